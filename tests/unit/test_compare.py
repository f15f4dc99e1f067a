from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from bapipe.cluster import Accelerator, AcceleratorType, Cluster, Link
from bapipe.compare import Pair, compare, comparison_table
from bapipe.errors import BaPipeError
from bapipe.evaluate import plan_timeline
from bapipe.files import content_hash
from bapipe.model import ModelRef
from bapipe.plan import Plan, PlanStage, Prediction
from bapipe.run_record import EventRecord, RunEnvironment, RunRecord, StepRecord
from bapipe.schedule.actions import Action, Kind
from bapipe.schedule.files import ScheduleFile
from bapipe.schedule.orders import make_schedule, with_update


def _stage(index: int, *, forward: float, backward: float) -> PlanStage:
    return PlanStage(
        accelerators=(f"host/{index}",),
        first_layer=index,
        last_layer=index,
        layers=(f"layer{index}",),
        forward=forward,
        backward=backward,
        weight_gradient=backward / 2,
        update=1.0,
        send_forward_bytes=0.0,
        send_backward_bytes=0.0,
        weight_bytes=0.0,
        memory_bytes=0.0,
        memory_capacity=1.0,
        peak_features=1.0,
    )


def _plan(*, update: bool = True) -> Plan:
    """N = 2, M = 4, F = 1, B = 2, no transfer time: (M+N−1)(F+B) = 15 seconds, and 1 more for the update."""
    schedule = make_schedule("1f1b-sno", 2, 4)
    cpu = AcceleratorType(
        name="cpu", kind="cpu", flops={}, memory=1.0, memory_bandwidth=1.0, execution="synchronous"
    )
    return Plan(
        kind="pipeline",
        model=ModelRef(name="tiny"),
        profile_hash="",
        cluster=Cluster(
            name="two",
            accelerators=tuple(Accelerator(name=f"host/{i}", type="cpu", node="host") for i in range(2)),
            types={"cpu": cpu},
            within=Link(bandwidth=1.0),
        ),
        dtype="fp32",
        optimizer="sgd",
        strategy="by hand",
        microbatch_size=1,
        microbatches=4,
        minibatch=4,
        stages=(_stage(0, forward=1.0, backward=2.0), _stage(1, forward=1.0, backward=2.0)),
        schedule=ScheduleFile.of(with_update(schedule) if update else schedule),
        prediction=Prediction(
            time=16.0,
            throughput=0.25,
            bubble=0.2,
            exposed_communication=0.0,
            lower_bound=12.0,
            gap=1 / 3,
            source="none",
        ),
    )


def _record(plan: Plan, *, slower: float = 1.0) -> RunRecord:
    """A run of what the simulator says of the plan with updates, so many times slower."""
    timeline = plan_timeline(replace(plan, schedule=_plan().schedule))
    rows = zip(timeline.ranks, timeline.stages, timeline.kinds, timeline.microbatches, strict=True)
    times = zip(timeline.start * slower, timeline.end * slower, strict=True)
    return RunRecord(
        model=plan.model,
        plan_hash=content_hash(plan),
        environment=RunEnvironment(torch="2", python="3", hosts=("a", "a"), backend="gloo", threads=1),
        world_size=2,
        steps=tuple(StepRecord(step=i, loss=1.0, seconds=time) for i, time in enumerate((90.0, 17.0, 19.0))),
        recorded_step=1,
        events=tuple(
            EventRecord(
                rank=int(rank),
                action=str(Action(int(stage), Kind(int(kind)), None if m < 0 else int(m))),
                start=float(start),
                end=float(end),
            )
            for (rank, stage, kind, m), (start, end) in zip(rows, times, strict=True)
        ),
        peak_live=(2, 1),
        peak_memory=(None, None),
    )


def test_a_run_as_predicted_has_no_error() -> None:
    plan = _plan()
    comparison = compare(plan, _record(plan))
    assert comparison.time == Pair(predicted=16.0, measured=16.0)
    assert comparison.bubble.predicted == comparison.bubble.measured == pytest.approx(1 - 26 / 32)
    assert comparison.step_seconds == 18.0
    for stage in comparison.stages:
        assert stage.rank == stage.stage
        assert stage.forward == Pair(predicted=1.0, measured=1.0)
        assert stage.backward == Pair(predicted=2.0, measured=2.0)
        assert stage.busy == Pair(predicted=13.0, measured=13.0)
        assert stage.bubble.measured == pytest.approx(3 / 16)
        assert stage.live.predicted == stage.live.measured == 2 - stage.stage
        assert stage.busy.error == 0


def test_a_run_twice_as_slow_was_predicted_at_half() -> None:
    plan = _plan()
    comparison = compare(plan, _record(plan, slower=2.0))
    assert comparison.time.error == pytest.approx(-0.5)
    assert [stage.forward.error for stage in comparison.stages] == pytest.approx([-0.5, -0.5])
    assert [stage.backward.measured for stage in comparison.stages] == pytest.approx([4.0, 4.0])
    assert comparison.bubble.measured == pytest.approx(comparison.bubble.predicted)


def test_a_plan_without_updates_is_set_against_the_run_up_to_its_last_backward() -> None:
    plan = _plan(update=False)
    comparison = compare(plan, _record(plan))
    assert comparison.time == Pair(predicted=15.0, measured=15.0)
    assert [stage.busy.measured for stage in comparison.stages] == [12.0, 12.0]
    assert not (comparison.measured.kinds == Kind.U).any()


def test_nothing_measured_has_no_error() -> None:
    assert Pair(predicted=1.0, measured=0.0).error is None


def test_the_table_shows_both_and_the_error() -> None:
    plan = _plan()
    console = Console(width=120)
    with console.capture() as capture:
        console.print(comparison_table(compare(plan, _record(plan, slower=2.0))))
    text = capture.get()
    assert "1 s → 2 s (-50%)" in text
    assert "16 s → 32 s (-50%)" in text
    assert "18.8% → 18.8%" in text
    assert "2 → 2" in text


def test_a_run_of_another_plan_is_refused() -> None:
    plan = _plan()
    with pytest.raises(BaPipeError, match=r"the run is of plan .*; give the plan that was run"):
        compare(replace(plan, optimizer="adam"), _record(plan))


def test_a_run_without_a_stage_is_refused() -> None:
    plan = _plan()
    record = _record(plan)
    only = tuple(event for event in record.events if event.rank == 0)
    with pytest.raises(BaPipeError, match="no events of stage 1"):
        compare(plan, replace(record, events=only))
