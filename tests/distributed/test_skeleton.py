"""Plans run by processes over gloo: gradients of one process, the order's memory, and failures that say so."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")

from skeleton_plans import ROOT, caps_of, double, make_plan, tiny_profile  # noqa: E402

from bapipe.compare import compare  # noqa: E402
from bapipe.errors import BaPipeError, DeadlockError  # noqa: E402
from bapipe.model import ModelRef  # noqa: E402
from bapipe.plan import Plan, read_plan, write_plan  # noqa: E402
from bapipe.run_record import read_run, to_timeline  # noqa: E402
from bapipe.schedule.actions import Action, Lane, Schedule  # noqa: E402
from bapipe.schedule.orders import make_schedule  # noqa: E402
from bapipe.torch import worker  # noqa: E402
from bapipe.torch.build import build_model, make_optimizer  # noqa: E402
from bapipe.torch.launch import launch  # noqa: E402
from bapipe.torch.split import boundaries, check_model, layer_names, stage_module  # noqa: E402
from bapipe.torch.support import microbatch_sizes, runnable_schedule  # noqa: E402

HERE = Path(__file__).resolve().parent
STEPS = 3
NAMES = ("layer0", "layer1", "layer2", "layer3", "layer4", "head")


def _small(schedule: str | Schedule, **options: object) -> Plan:
    """A plan of a float64 model that is small enough to run many of."""
    model = double(tiny_profile().model, hidden=12, layers=len(NAMES))
    return make_plan(schedule, model=model, layers=NAMES, **options)  # type: ignore[arg-type]


def _fragile(how: str, note: str, **options: int) -> Plan:
    """Three stages, of which the second does what it is asked to in its eleventh forward."""
    model = ModelRef(name="fragile", ref="fragile_model:build", args={"how": how, "at": 10, "note": note})
    layers = ("first", "second", "third")
    return make_plan("1f1b-sno", stages=3, microbatch_size=2, model=model, layers=layers, **options)  # type: ignore


def _out_of_order() -> Schedule:
    """
    rank 0   0F0 0F1 0F2 ··········· 0B0 0B1 0B2     errors come in another order than they are needed in
    rank 1       1F0 1F1 1F2 1B2 1B1 1B0
    """
    orders = ("F0 F1 F2 B0 B1 B2", "F0 F1 F2 B2 B1 B0")
    lanes = [
        Lane.of(rank, [Action.parse(f"{rank}{a}") for a in order.split()]) for rank, order in enumerate(orders)
    ]
    return replace(make_schedule("gpipe", 2, 3), lanes=tuple(lanes))


CASES: dict[str, Callable[[], Plan]] = {
    "2-sno-1": lambda: _small("1f1b-sno", microbatches=1),
    "2-so-5-short": lambda: _small("1f1b-so", microbatches=5, minibatch=33, optimizer="momentum"),
    "2-gpipe-8": lambda: _small("gpipe", microbatches=8, microbatch_size=2, update=False),
    "2-caps-2": lambda: _small("1f1b:3,1", microbatches=2, optimizer="adam"),
    "2-out-of-order": lambda: _small(_out_of_order(), microbatches=3),
    "3-sno-8-short": lambda: _small("1f1b-sno", stages=3, microbatches=8, microbatch_size=4, minibatch=29),
    "3-so-2": lambda: _small("1f1b-so", stages=3, microbatches=2, optimizer="adam", update=False),
    "3-gpipe-5": lambda: _small("gpipe", stages=3, microbatches=5, optimizer="momentum"),
    "3-caps-8": lambda: _small("1f1b:5,4,1", stages=3, microbatches=8, microbatch_size=1),
    "3-sno-1": lambda: _small("1f1b-sno", stages=3, microbatches=1, minibatch=3),
    "3-overwriting": lambda: _fragile("steady", "", microbatches=5, minibatch=9),
    "3-so-8": lambda: _small("1f1b-so", stages=3, microbatches=8, microbatch_size=3),
}
"""schedules, M, ranks, a short last micro-batch and optimizers, each pair of them in some case"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where three processes have run all cases."""
    folder = tmp_path_factory.mktemp("cases")
    for case, plan in CASES.items():
        write_plan(plan(), folder / f"plan-{case}.json")
    command = [sys.executable, str(HERE / "skeleton_worker.py"), str(folder)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    logs = [folder / f"log-{rank}" for rank in range(3)]
    workers = []
    for rank, log in enumerate(logs):
        with log.open("w") as stream:
            workers.append(
                subprocess.Popen([*command, str(rank)], cwd=ROOT, env=environment, stdout=stream, stderr=stream)
            )
    try:
        codes = [process.wait(timeout=50) for process in workers]
    finally:
        for process in workers:
            process.kill()
            process.wait()
    assert codes == [0, 0, 0], "\n".join(log.read_text() for log in logs)
    return folder


def _alone(plan: Plan) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses and gradients of plain training on whole mini-batches."""
    built = build_model(plan.model, folders=[ROOT])
    optimizer = make_optimizer(plan.optimizer, built.module, rate=0.05)
    losses, found = [], []
    for step in range(STEPS):
        data, target = built.batch(1 + step, plan.minibatch)
        built.module.zero_grad()
        loss = built.loss(built.module(data), target)
        loss.backward()
        losses.append(loss.item())
        found.append({name: p.grad.clone() for name, p in built.module.named_parameters()})
        optimizer.step()
    return losses, found


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_losses_are_those_of_one_process(ran: Path, case: str) -> None:
    plan = read_plan(ran / f"plan-{case}.json")
    losses, expected = _alone(plan)
    record = read_run(ran / f"run-{case}.json")
    assert [step.loss for step in record.steps] == pytest.approx(losses, rel=1e-12)
    left = [torch.load(ran / f"left-{case}-{rank}.pt") for rank in range(len(plan.ranks))]
    for step in range(STEPS):
        found = {name: value for rank in left for name, value in rank["gradients"][step].items()}
        assert found.keys() == expected[step].keys()
        for name, wanted in expected[step].items():
            assert wanted.abs().max() > 0
            difference = ((found[name] - wanted).abs().max() / wanted.abs().max()).item()
            assert difference <= 1e-12, f"{name}, step {step}: {difference}"


@pytest.mark.parametrize("case", CASES)
def test_the_check_agrees(ran: Path, case: str) -> None:
    check = read_run(ran / f"run-{case}.json").check
    assert check is not None
    assert check.steps == STEPS
    assert check.tolerance == 1e-12
    assert check.passed


@pytest.mark.parametrize("case", CASES)
def test_as_many_micro_batches_are_live_as_the_order_asks_for(ran: Path, case: str) -> None:
    plan = read_plan(ran / f"plan-{case}.json")
    record = read_run(ran / f"run-{case}.json")
    assert record.peak_live == caps_of(plan)
    assert tuple(to_timeline(record).peak_live()) == caps_of(plan)


@pytest.mark.parametrize("case", CASES)
def test_nothing_is_kept_after_a_step(ran: Path, case: str) -> None:
    plan = read_plan(ran / f"plan-{case}.json")
    for rank in range(len(plan.ranks)):
        tensors = torch.load(ran / f"left-{case}-{rank}.pt")["tensors"]
        assert tensors[1] == tensors[2]


@pytest.mark.parametrize("case", CASES)
def test_the_recorded_step_is_the_plans_order(ran: Path, case: str) -> None:
    plan = read_plan(ran / f"plan-{case}.json")
    record = read_run(ran / f"run-{case}.json")
    for lane in plan.schedule.lanes:
        events = [event for event in record.events if event.rank == lane.rank]
        update = () if lane.actions[-1].endswith("U") else (f"{lane.rank}U",)
        assert tuple(event.action for event in events) == (*lane.actions, *update)
        assert all(before.end <= after.start for before, after in itertools.pairwise(events))
    ends = {event.action: event.end for event in record.events}
    starts = {event.action: event.start for event in record.events}
    assert record.transfers is not None
    assert len(record.transfers) == 2 * (len(plan.stages) - 1) * plan.microbatches
    for transfer in record.transfers:
        action = Action.parse(transfer.action)
        onward = 1 if action.kind.name == "F" else -1
        needed = str(replace(action, stage=action.stage + onward))
        assert ends[transfer.action] <= transfer.start <= transfer.arrival <= starts[needed]
    comparison = compare(plan, record)
    assert [stage.live.predicted for stage in comparison.stages] == list(caps_of(plan))
    assert 0 < comparison.time.measured <= comparison.step_seconds * 10


def test_clocks_are_aligned(ran: Path) -> None:
    first, same, other = (json.loads((ran / f"clock-{rank}.json").read_text()) for rank in range(3))
    assert first == same == 0.0
    assert other == pytest.approx(1000.0, abs=0.05)


def test_a_launched_run_is_checked_and_recorded(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_plan(_small("1f1b-so", microbatches=3), tmp_path / "plan.json")
    code = launch(tmp_path / "plan.json", steps=4, check=True, out=tmp_path / "run.json", timeout=60)
    output = capfd.readouterr()
    assert (code, output.err) == (0, "")
    lines = output.out.splitlines()
    assert [line.split()[:2] for line in lines[:4]] == [["step", str(step)] for step in range(4)]
    assert "gradients differ from one process by at most" in lines[-1]
    record = read_run(tmp_path / "run.json")
    assert record.recorded_step in (1, 2, 3)
    assert record.environment.backend == "gloo"
    assert all(memory is not None and memory > 1e7 for memory in record.peak_memory)


@pytest.mark.parametrize("how", ["kill", "raise", pytest.param("hang", marks=pytest.mark.slow)])
def test_a_rank_that_fails_ends_all_with_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The eleventh forward is the third micro-batch of the third step."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    note = tmp_path / "note"
    write_plan(_fragile(how, str(note), microbatches=4), tmp_path / "plan.json")
    timeout = 8 if how == "hang" else 60
    code = launch(tmp_path / "plan.json", steps=9, timeout=timeout)
    seconds = time.time() - float(note.read_text())
    errors = capfd.readouterr().err.splitlines()
    assert code == 1
    assert len(errors) == 1
    assert errors[0].startswith("bapipe: rank 1, stage 1, action 1F2 of step 2: ")
    reasons = {
        "kill": "was killed by SIGKILL; rank ",
        "raise": "ValueError: the layer broke (",
        "hang": "did not answer in time; rank ",
    }
    assert reasons[how] in errors[0]
    assert seconds < (timeout + 5 if how == "hang" else 5)


def test_a_wrong_world_size_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_plan(_small("1f1b-sno", stages=3), tmp_path / "plan.json")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert worker.main([str(tmp_path / "plan.json")]) == 2
    error = capsys.readouterr().err
    assert error == (
        "bapipe: the plan needs 3 ranks, torchrun started 2; start it with --nproc-per-node 3 or use bapipe run\n"
    )


def test_another_model_is_refused() -> None:
    plan = make_plan("1f1b-sno")
    check_model(build_model(plan.model, folders=[ROOT]).module, plan.model, plan.stages)
    other = replace(plan.model, args={"hidden": 16, "layers": 8})
    module = build_model(other, folders=[ROOT]).module
    with pytest.raises(BaPipeError, match=r"fingerprint .* but the plan is of .*; profile and plan it again"):
        check_model(module, other, plan.stages)
    fewer = replace(other, args={"hidden": 16, "layers": 7}, fingerprint=None)
    module = build_model(fewer, folders=[ROOT]).module
    with pytest.raises(BaPipeError, match=r"8 layers and .* 7: where the plan has 'layer6' the model has 'head'"):
        check_model(module, fewer, plan.stages)


@pytest.mark.parametrize(
    "ref, args, message",
    [
        ("examples.tiny_model", {}, "looks like package.module:function, got 'examples.tiny_model'"),
        ("no_such_model:build", {}, "'no_such_model:build' cannot be imported: No module named"),
        ("examples.tiny_model:bild", {}, r"no function 'bild' \(did you mean 'build'\?\)"),
        ("examples.tiny_model:build", {"width": 3}, r"'examples.tiny_model:build' called with \(width=3\) failed"),
        ("math:gcd", {}, r"'math:gcd' must return \(module, args, kwargs\), got int"),
    ],
)
def test_a_reference_that_builds_no_model_is_refused(ref: str, args: dict[str, int], message: str) -> None:
    with pytest.raises(BaPipeError, match=message):
        build_model(ModelRef(name="x", ref=ref, args=dict(args)), folders=[ROOT])


def test_a_stage_keeps_the_models_names_and_nothing_else() -> None:
    plan = _small("1f1b-sno", stages=3)
    module = build_model(plan.model, folders=[ROOT]).module
    parts = [stage_module(module, stage) for stage in plan.stages]
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert names == [name for name, _ in module.named_parameters()]
    assert layer_names(parts[1]) == plan.stages[1].layers


def test_layers_that_share_a_parameter_are_not_cut_apart() -> None:
    plan = _small("1f1b-sno")
    module = build_model(plan.model, folders=[ROOT]).module
    module.get_submodule("layer4.0").weight = module.get_submodule("layer1.0").weight
    with pytest.raises(BaPipeError, match="'layer1' and 'layer4' share a parameter"):
        stage_module(module, plan.stages[0])


def test_only_one_tensor_can_cross_a_cut() -> None:
    recurrent = torch.nn.Sequential(torch.nn.LSTM(4, 4))
    with pytest.raises(BaPipeError, match="layer '0' returns a tuple"):
        boundaries(recurrent, (torch.zeros(1, 4),), {}, sizes=[2])
    with pytest.raises(BaPipeError, match=r"only an nn.Sequential .* got LSTM"):
        layer_names(torch.nn.LSTM(4, 4))


@pytest.mark.parametrize(
    "schedule, message",
    [
        (make_schedule("pipedream", 2, 4), "pipedream updates while it runs"),
        (make_schedule("fbp-as", 2, 4), "rank 0 has 1 stages on 2 lanes"),
        (make_schedule("zb-h1", 2, 4), "action 0I0 cannot be run yet"),
    ],
)
def test_a_schedule_that_cannot_be_run_yet_is_refused(schedule: Schedule, message: str) -> None:
    with pytest.raises(BaPipeError, match=message):
        runnable_schedule(_small(schedule, update=False))


def test_an_order_that_waits_for_ever_is_refused_before_it_starts() -> None:
    with pytest.raises(DeadlockError, match="waits for ever"):
        runnable_schedule(_small("1f1b:1,2"))


def test_micro_batches_must_hold_the_mini_batch() -> None:
    assert microbatch_sizes(_small("gpipe", microbatches=3, minibatch=17)) == (8, 8, 1)
    for samples in (16, 25):
        with pytest.raises(BaPipeError, match=f"3 micro-batches of 8 cannot hold a mini-batch of {samples}"):
            microbatch_sizes(_small("gpipe", microbatches=3, minibatch=samples))
