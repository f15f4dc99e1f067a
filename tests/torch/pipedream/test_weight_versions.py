"""Stashed weights and stale updates in one process: what they are, and what is refused."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from bapipe.errors import BaPipeError
from bapipe.records.plan import read_plan
from bapipe.records.run_record import read_run
from bapipe.schedule.actions import Action, Lane
from bapipe.schedule.generators import capped, pipedream, with_update
from bapipe.schedule.schedule_file import ScheduleFile
from bapipe.torch.inputs.build_model import BuiltModel
from bapipe.torch.pipedream.weight_versions import WeightVersions
from bapipe.torch.runtime.plan_checks import as_runnable, check_plan
from bapipe.torch.stage.loss import LossOfEach
from bapipe.torch.verify.stale_check import Holding, train_stale
from paths import REPOSITORY

ROOT = REPOSITORY


class Product(nn.Module):
    """y = b · a · x, both scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        self.second = nn.Linear(1, 1, bias=False, dtype=torch.float64)
        nn.init.constant_(self.first.weight, 0.5)
        nn.init.constant_(self.second.weight, -1.5)

    def forward(self, value: Tensor) -> Tensor:
        return self.second(self.first(value))


def half_square(output: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (output - target).square().mean()


@pytest.mark.parametrize("lags", [(1, 0), (2, 2), (3, 1), (0, 0)])
def test_stale_updates_are_those_worked_out_by_hand(lags: tuple[int, int]) -> None:
    """L = ½(bax − t)²: dL/da = (bax − t)bx and dL/db = (bax − t)ax, at the versions that micro-batch m sees."""
    values = [0.3, -1.1, 0.7, 1.9, -0.4, 0.8]
    rate, target = 0.1, 1.0
    a, b, losses = [0.5], [-1.5], []
    for m, x in enumerate(values):
        old_a, old_b = a[max(0, m - lags[0])], b[max(0, m - lags[1])]
        error = old_b * old_a * x - target
        losses.append(0.5 * error**2)
        a.append(a[-1] - rate * error * old_b * x)
        b.append(b[-1] - rate * error * old_a * x)
    module = Product()
    built = BuiltModel(
        module=module,
        args=(torch.zeros(1, 1, dtype=torch.float64),),
        kwargs={},
        loss=half_square,
    )
    inputs = torch.tensor(values, dtype=torch.float64).reshape(2, 3, 1)
    batches = [(part, torch.full((3, 1), target, dtype=torch.float64)) for part in inputs]
    found = []
    train_stale(
        built,
        batches,
        sizes=(1, 1, 1),
        held={"first.weight": [Holding(lag=lags[0])], "second.weight": [Holding(lag=lags[1])]},
        optimizer=torch.optim.SGD(module.parameters(), lr=rate),
        after_update=lambda _, loss: found.append((loss, module.first.weight.item(), module.second.weight.item())),
    )
    for (loss, first, second), *expected in zip(found, losses, a[1:], b[1:], strict=True):
        assert all(map(math.isclose, (loss, first, second), expected))


def _order(lag: int, count: int) -> list[tuple[str, int]]:
    """F and B of a stage that holds lag + 1 micro-batches."""
    lane = capped(lag + 1, count, range(lag + 1, 0, -1)).lanes[0]
    return [(action.kind.name, action.microbatch or 0) for action in lane]


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("count", [1, 3, 9])
def test_a_backward_sees_what_its_forward_saw(lag: int, count: int) -> None:
    weight = nn.Parameter(torch.tensor([2.0, 3.0], dtype=torch.float64))
    frozen = nn.Parameter(torch.tensor([7.0]), requires_grad=False)
    versions = WeightVersions({"weight": weight, "frozen": frozen}, lag)
    versions.begin(count)
    history = [weight.detach().clone()]
    losses: dict[int, Tensor] = {}
    memories = set()
    for kind, number in _order(lag, count):
        if kind == "F":
            seen = versions.weights(number)
            assert seen.keys() == {"weight"}
            assert torch.equal(seen["weight"], history[max(0, number - lag)])
            memories.add(seen["weight"].data_ptr())
            losses[number] = (seen["weight"] ** 3).sum() * (number + 1)
        else:
            torch.autograd.backward(losses.pop(number))

            def apply(number: int = number) -> None:
                expected = 3 * history[max(0, number - lag)] ** 2 * (number + 1)
                assert weight.grad is not None
                assert torch.equal(weight.grad, expected)
                with torch.no_grad():
                    weight.sub_(0.01 * weight.grad)

            versions.step(number, apply)
            history.append(weight.detach().clone())
    assert len(history) == count + 1
    assert versions.peak == min(lag + 1, count)
    assert len(memories | {weight.data_ptr()}) <= lag + 1, "memory is used again"


def test_each_micro_batch_has_a_loss_of_its_own() -> None:
    loss = LossOfEach(lambda output, target: (output.sum(), target))
    first = loss.of(torch.tensor([2.0, 4.0]), 4, 0, count=True)
    second = loss.of(torch.tensor([1.0]), torch.tensor(2), 0, count=True)
    assert (first.item(), second.item()) == (1.5, 0.5)
    assert loss.taken() == [(1.5, 4.0), (0.5, 2.0)]
    assert loss.taken() == []


def test_which_plans_never_flush() -> None:
    plan = read_plan(ROOT / "examples" / "plan.json")
    M = plan.microbatches
    endless = replace(plan, schedule=ScheduleFile.of(pipedream(2, M)))
    assert not check_plan(endless).schedule.flushes
    assert not as_runnable(endless, flushes=False).schedule.flushes
    with pytest.raises(BaPipeError, match="pipedream updates while it runs; train it with PipeDream"):
        as_runnable(endless, flushes=True)
    with pytest.raises(BaPipeError, match="waits for every global batch to end; train it with Pipeline"):
        as_runnable(plan, flushes=False)
    updated = replace(endless, schedule=ScheduleFile.of(with_update(pipedream(2, M))))
    with pytest.raises(BaPipeError, match="1F1B's order only"):
        check_plan(updated)
    lanes = pipedream(2, M).lanes
    swapped = Lane.of(0, [Action(0, lanes[0][0].kind, 1), Action(0, lanes[0][0].kind, 0), *list(lanes[0])[2:]])
    other = replace(endless.schedule.to_schedule(), lanes=(swapped, lanes[1]))
    with pytest.raises(BaPipeError, match="order"):
        check_plan(replace(endless, schedule=ScheduleFile.of(other)))


def test_old_run_records_have_one_version() -> None:
    assert read_run(ROOT / "examples" / "run.json").weight_versions == ()


def test_weights_in_one_piece_stay_in_one_in_every_version() -> None:
    """As cuDNN wants those of an LSTM; what lies within something large is copied without the rest of it."""
    piece, large = torch.arange(6.0), torch.arange(100.0)
    parameters = {
        "one": nn.Parameter(piece[:2]),
        "other": nn.Parameter(piece[2:].view(2, 2)),
        "inside": nn.Parameter(large[50:52]),
    }
    versions = WeightVersions(parameters, lag=2)
    versions.begin(4)

    def addresses() -> list[int]:
        return [item.untyped_storage().data_ptr() for item in parameters.values()]

    seen, sizes = [addresses()], []
    for microbatch in range(3):
        for tensor in versions.weights(microbatch).values():
            tensor.grad = torch.ones_like(tensor)
        versions.step(microbatch, lambda: [item.data.sub_(item.grad) for item in parameters.values()] and None)
        seen.append(addresses())
        sizes.append(parameters["inside"].untyped_storage().nbytes())
    assert all(one == other for one, other, _ in seen)
    assert seen[0] != seen[1] != seen[2]
    assert parameters["one"].tolist() == [-3.0, -2.0]
    assert parameters["other"].tolist() == [[-1.0, 0.0], [1.0, 2.0]]
    assert parameters["inside"].tolist() == [47.0, 48.0]
    assert sizes == [8, 8, 400], "two copies, then the memory of the first version, which nobody needs any more"
    assert {name: item.tolist() for name, item in versions.weights(3).items()} == {
        "one": [-1.0, 0.0],
        "other": [[1.0, 2.0], [3.0, 4.0]],
        "inside": [49.0, 50.0],
    }
