"""torch's engine: what it refuses, in one line; and that on one rank it trains as ours, whatever the plan has."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")

from torch import Tensor, nn  # noqa: E402

from bapipe import plan as make_plan  # noqa: E402
from bapipe.errors import BaPipeError  # noqa: E402
from bapipe.records.plan import Plan  # noqa: E402
from bapipe.records.plan_consistency import microbatch_sizes  # noqa: E402
from bapipe.schedule.generators import SCHEDULES, make_schedule  # noqa: E402
from bapipe.schedule.schedule_file import ScheduleFile  # noqa: E402
from bapipe.torch.runtime import pipelining_internals, torch_executor  # noqa: E402
from bapipe.torch.runtime.engine_table import engine_table  # noqa: E402
from bapipe.torch.runtime.engines import (  # noqa: E402
    CAPABILITIES,
    ENGINES,
    check_engine,
    check_torch_version,
    refusal,
)
from bapipe.torch.runtime.pipeline import Pipeline  # noqa: E402
from made_profiles import made_cluster, made_profile  # noqa: E402
from one_rank_plan import one_rank  # noqa: E402
from paths import REPOSITORY  # noqa: E402
from private_names import private_names  # noqa: E402

RUNTIME = REPOSITORY / "src" / "bapipe" / "torch" / "runtime"
PAGE = REPOSITORY / "docs" / "guide" / "engines.md"


def planned(schedule: str = "1f1b-so", **options: Any) -> Plan:
    options = {"global_batch": 8, "micro_batch": 2, "stages": 2, **options}
    return make_plan(
        made_profile({"cpu-core": [1.0, 1.0, 1.0]}), made_cluster({"cpu-core": 4}), schedule=schedule, **options
    )


def recomputing(plan: Plan) -> Plan:
    return replace(plan, stages=(replace(plan.stages[0], recompute=True), *plan.stages[1:]))


def replicated(plan: Plan, counts: tuple[int, int]) -> Plan:
    names = iter(accelerator.name for accelerator in plan.cluster.accelerators)
    stages = [
        replace(stage, accelerators=tuple(next(names) for _ in range(count)))
        for stage, count in zip(plan.stages, counts, strict=True)
    ]
    schedule = make_schedule("1f1b-so", 2, plan.microbatches, replicas=counts)
    return replace(plan, stages=tuple(stages), schedule=ScheduleFile.of(schedule))


def short(plan: Plan) -> Plan:
    found = replace(plan, global_batch=plan.global_batch - 1)
    assert microbatch_sizes(found)[-1] == 1
    return found


REFUSED = {
    "replicas of the whole pipeline": (lambda: replicated(planned(), (2, 2)), "2 replicas of the pipeline"),
    "uneven replicas": (lambda: replicated(planned(), (2, 1)), "stages have 2, 1 replicas"),
    "activation checkpointing": (lambda: recomputing(planned()), "stages 0 recompute"),
    "short last micro-batch": (lambda: short(planned()), "the last micro-batch has 1 of 2"),
    "PipeDream's order": (lambda: planned("pipedream"), "PipeDream's order"),
    "compiled layers whose backward is in two parts": (
        lambda: replace(planned("zb-h1"), compiled=True),
        "compiled layers whose backward",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_run_is_refused_by_name(name: str) -> None:
    make, words = REFUSED[name]
    plan = make()
    with pytest.raises(BaPipeError, match="use --engine bapipe, or ") as caught:
        check_engine(plan, plan.schedule.to_schedule(), "torch")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    check_engine(plan, plan.schedule.to_schedule(), "bapipe")


def test_every_refusal_of_the_table_is_tested() -> None:
    assert {item.name for item in CAPABILITIES if item.torch == "refused"} == set(REFUSED)


def test_an_engine_that_is_not_known() -> None:
    plan = planned()
    with pytest.raises(BaPipeError, match=r"an engine is one of bapipe, torch, got 'torhc'.*torch"):
        check_engine(plan, plan.schedule.to_schedule(), "torhc")


def test_a_version_of_torch_that_is_not_known() -> None:
    check_torch_version("torch", "2.13.0+cpu")
    check_torch_version("bapipe", "9.1")
    for version in ("2.10.1", "2.14.0a0", "3.0"):
        with pytest.raises(BaPipeError, match=rf"this is {re.escape(version)}, .*use --engine bapipe"):
            check_torch_version("torch", version)


def test_the_guide_has_the_table() -> None:
    found = re.search(r"<!-- engines -->\n(.*?)\n?<!-- end -->", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    assert found[1].strip() == engine_table().strip(), (
        "write fill_engine_page(text) of engine_table.py to the page"
    )
    assert len(engine_table().splitlines()) == 2 + len(CAPABILITIES)
    assert set(ENGINES) == {"bapipe", "torch"}


@pytest.mark.parametrize("name", ["engines.py", "torch_connection.py", "torch_executor.py", "rank_engine.py"])
def test_private_parts_of_torch_are_in_one_file(name: str) -> None:
    assert private_names(RUNTIME / name) == []
    assert private_names(RUNTIME / "pipelining_internals.py")


class Mixed(nn.Module):
    """Two layers, with a value that skips one, an integer that crosses, and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.table = nn.Embedding(5, 6)

    def forward(self, value: Tensor, which: Tensor) -> Tensor:
        first = torch.tanh(self.one(value))
        index = first.argmax(1) + which
        second = torch.tanh(self.two(first))
        return second + first + self.table(index % 5)


def build_mixed() -> tuple[nn.Module, tuple[Tensor, ...], dict[str, object]]:
    return Mixed(), (torch.rand(4, 6), torch.arange(4)), {}


def stages_on_one_rank(layers: list[str], schedule: str, *, dtype: str = "fp32") -> Plan:
    """Two stages on the only rank, the second from the last layer on."""
    plan = one_rank()
    cut = len(layers) - 1
    ends = ((0, cut - 1), (cut, cut))
    stages = [
        replace(plan.stages[0], first_layer=first, last_layer=last, layers=tuple(layers[first : last + 1]))
        for first, last in ends
    ]
    return replace(
        plan, dtype=dtype, stages=tuple(stages), schedule=ScheduleFile.of(make_schedule(schedule, 1, 2))
    )


def trained(plan: Plan, engine: str, **options: Any) -> tuple[list[float], dict[str, Tensor | None], Pipeline]:
    torch.manual_seed(3)
    inputs, targets = (torch.rand(8, 6), torch.arange(8)), torch.rand(8, 6)
    with Pipeline(build_mixed, plan, nn.functional.mse_loss, engine=engine, seed=1, **options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            losses.append(pipe.step(inputs, targets))
            losses.append(pipe.clip_grad_norm_(0.05))
            optimizer.step()
            losses.append(pipe.evaluate(inputs, targets))
    return losses, {name: item.grad for name, item in pipe.named_parameters()}, pipe


def layer_names() -> list[str]:
    from bapipe.torch.capturing import capture

    module, args, kwargs = build_mixed()
    return [layer.name for layer in capture(module, args, kwargs, check=False).layers]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("schedule", ["interleaved", "zb-v"])
def test_it_trains_as_our_engine(schedule: str, dtype: str) -> None:
    plan = stages_on_one_rank(layer_names(), schedule, dtype=dtype)
    ours, expected, _ = trained(plan, "bapipe")
    losses, gradients, pipe = trained(plan, "torch")
    assert losses == pytest.approx(ours, rel=1e-6)
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, expected[name], rtol=1e-5, atol=1e-7), name
    assert pipe.trace is not None
    actions = [action for action, _, _ in pipe.trace.events]
    assert actions == [str(action) for action in plan.schedule.to_schedule().lanes[0] if action.kind <= 3]


@pytest.mark.usefixtures("alone")
def test_older_versions_carry_values_with_gradients_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pipelining_internals.carries_any_value() == (torch.__version__ >= "2.13")
    monkeypatch.setattr(torch_executor, "carries_any_value", lambda: False)
    plan = stages_on_one_rank(layer_names(), "interleaved")
    with pytest.raises(BaPipeError, match="int64 one without crosses from stage 0 to 1; use --engine"):
        trained(plan, "torch")


@pytest.mark.usefixtures("alone")
def test_an_action_that_fails_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    def broken(_output: Tensor, _target: Tensor) -> Tensor:
        raise ValueError("no loss today")

    plan = stages_on_one_rank(layer_names(), "interleaved")
    with Pipeline(build_mixed, plan, broken, engine="torch", seed=1) as pipe:
        with pytest.raises(Exception, match="no loss today") as caught:
            pipe.step((torch.rand(8, 6), torch.arange(8)), torch.rand(8, 6))
        assert "stage 1" in str(caught.value)
        assert "failed to run forward" not in str(caught.value)
    assert "Full Schedule" not in capfd.readouterr().err


def test_another_transport_is_refused() -> None:
    from bapipe.torch.runtime.torch_connection import connect_torch

    with pytest.raises(BaPipeError, match=r"torch's engine sends by gloo between .*, got --transport nccl"):
        connect_torch("nccl", device=torch.device("cpu"), timeout=1.0)


def test_every_schedule_but_the_endless_one_is_for_both_engines() -> None:
    for name in SCHEDULES:
        schedule = make_schedule(name, 2, 4)
        if schedule.concurrency != "none" or schedule.sending != "after-compute":
            continue
        plan = planned()
        stages = (plan.stages[0],) * schedule.num_stages
        text = refusal(replace(plan, stages=stages, schedule=ScheduleFile.of(schedule)), schedule, "torch")
        assert (text is None) == schedule.flushes, name


def test_a_value_that_the_stage_computes_on_with_is_returned_as_a_copy() -> None:
    """torch detaches what a stage with a split backward returns, in place: what was saved of it would be lost."""
    weight = nn.Parameter(torch.rand(3))

    def compute(_: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        sent = received[0] * weight
        return sent, sent * sent

    stage = pipelining_internals.ComputedStage(nn.Module(), compute, split=True)
    received = torch.rand(3, requires_grad=True)
    sent, square = stage(received)
    sent.detach_()
    square.sum().backward()
    assert received.grad is not None
    assert torch.allclose(received.grad, 2 * received.detach() * weight.detach() ** 2)
