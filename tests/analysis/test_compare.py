"""Predicted beside measured, on plans small enough to count by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from bapipe.analysis.predicted_measured import Comparison, Pair, compare, comparison_values
from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import Accelerator, AcceleratorType, Cluster, Link
from bapipe.models.layers import ModelRef
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.records.plan import Plan, PlanStage, Prediction
from bapipe.records.run_record import EventRecord, RunRecord, StepRecord
from bapipe.reporting.terminal.compare_table import comparison_notes, comparison_tables
from bapipe.schedule.actions import Kind, Schedule
from bapipe.schedule.generators import capped, interleaved, make_schedule, with_recompute, with_update
from bapipe.schedule.schedule_file import ScheduleFile
from made_runs import made_run, stretched


def _plan(
    *,
    update: bool = True,
    schedule: Schedule | None = None,
    accelerators: Sequence[Sequence[int]] = ((0,), (1,)),
    all_reduce: Sequence[float] | None = None,
    size: float = 0.0,
) -> Plan:
    """Stages of F = 1, B = 2 and U = 1, with transfers of `size` bytes at 1 byte/s.

    As it stands N = 2, M = 4 in 1f1b-sno: (M+N−1)(F+B) = 15 seconds, and 1 more for the update.
    """
    if schedule is None:
        schedule = make_schedule("1f1b-sno", 2, 4)
        schedule = with_update(schedule) if update else schedule
    cpu = AcceleratorType(
        name="cpu", kind="cpu", flops={}, memory=1.0, memory_bandwidth=1.0, execution="synchronous"
    )
    last = len(accelerators) - 1
    stages = tuple(
        PlanStage(
            accelerators=tuple(f"host/{rank}" for rank in ranks),
            first_layer=index,
            last_layer=index,
            layers=(f"layer{index}",),
            recompute=any((lane.kinds == Kind.R).any() for lane in schedule.lanes),
            forward=1.0,
            backward=2.0,
            weight_gradient=1.0,
            update=1.0,
            all_reduce=all_reduce[index] if all_reduce else 0.0,
            send_forward_bytes=size if index < last else 0.0,
            send_backward_bytes=size if index > 0 else 0.0,
            weight_bytes=0.0,
            memory_bytes=10.0,
            memory_capacity=1.0,
            in_flight=1.0,
        )
        for index, ranks in enumerate(accelerators)
    )
    ranks = sorted({rank for own in accelerators for rank in own})
    return Plan(
        kind="pipeline",
        model=ModelRef(name="tiny"),
        profile_hash="",
        cluster=Cluster(
            name="two",
            accelerators=tuple(Accelerator(name=f"host/{rank}", type="cpu", node="host") for rank in ranks),
            types={"cpu": cpu},
            within=Link(bandwidth=1.0),
        ),
        dtype="fp32",
        optimizer="sgd",
        strategy="by hand",
        microbatch_size=1,
        microbatches=4,
        global_batch=4,
        stages=stages,
        schedule=ScheduleFile.of(schedule),
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


def _record(plan: Plan, *, slower: float = 1.0, outside: float = 0.0) -> RunRecord:
    """A run of what the simulator says of the plan, so many times slower."""
    return made_run(plan, stretched(plan_timeline(plan), slower), outside=outside)


def test_a_run_as_predicted_has_no_error() -> None:
    plan = _plan()
    comparison = compare(plan, _record(plan, outside=0.5))
    assert comparison.time == Pair(predicted=16.0, measured=16.0)
    assert comparison.bubble.predicted == comparison.bubble.measured == pytest.approx(1 - 26 / 32)
    assert comparison.step == Pair(predicted=16.0, measured=16.5)
    assert comparison.overhead == Pair(predicted=0.0, measured=0.5)
    assert (comparison.step_seconds, comparison.outside_seconds) == (16.5, 0.5)
    assert comparison_notes(comparison)[2] == "beside its actions: 500 ms, which the plan does not count"
    assert [(row.stage, row.rank) for row in comparison.stages] == [(0, 0), (1, 1)]
    for stage in comparison.stages:
        assert stage.forward == Pair(predicted=1.0, measured=1.0)
        assert stage.backward == Pair(predicted=2.0, measured=2.0)
        assert stage.update == Pair(predicted=1.0, measured=1.0)
        assert stage.busy == Pair(predicted=13.0, measured=13.0)
        assert stage.exposed == Pair(predicted=0.0, measured=0.0)
        assert stage.bubble.measured == pytest.approx(3 / 16)
        assert stage.in_flight.predicted == stage.in_flight.measured == 2 - stage.stage
        assert stage.busy.error == 0
        assert (stage.recompute, stage.input_gradient, stage.weight_gradient, stage.all_reduce) == (None,) * 4


def test_a_step_is_compared_with_the_plans_own_prediction() -> None:
    """The plan counts 2 s beside its actions; the run had 0.5 s."""
    plan = _plan()
    plan = replace(plan, prediction=replace(plan.prediction, time=18.0))
    comparison = compare(plan, _record(plan, outside=0.5))
    assert comparison.step == Pair(predicted=18.0, measured=16.5)
    assert comparison.overhead == Pair(predicted=2.0, measured=0.5)
    assert comparison.time == Pair(predicted=16.0, measured=16.0)
    notes = comparison_notes(comparison)
    assert notes[0] == "step: 18 → 16.5 s (+9%), the median of the run"
    assert notes[1].startswith("its actions, first to last: 16 → 16 s (+0%), bubble ")
    assert notes[2] == "beside its actions: 2 s → 500 ms (+300%)"


def test_a_run_twice_as_slow_was_predicted_at_half() -> None:
    plan = _plan()
    comparison = compare(plan, _record(plan, slower=2.0))
    assert comparison.time.error == pytest.approx(-0.5)
    assert [stage.forward.error for stage in comparison.stages] == pytest.approx([-0.5, -0.5])
    assert [stage.backward.measured for stage in comparison.stages] == pytest.approx([4.0, 4.0])
    assert comparison.bubble.measured == pytest.approx(comparison.bubble.predicted)


def test_the_median_step_leaves_out_the_first() -> None:
    plan = _plan()
    steps = tuple(StepRecord(step=i, loss=1.0, seconds=time) for i, time in enumerate((90.0, 17.0, 19.0)))
    comparison = compare(plan, replace(_record(plan), steps=steps))
    assert comparison.step_seconds == 18.0
    assert comparison.outside_seconds == 1.0


def test_a_plan_without_updates_is_set_against_the_run_up_to_its_last_backward() -> None:
    plan = _plan(update=False)
    record = made_run(plan, plan_timeline(_plan()))
    comparison = compare(plan, record)
    assert comparison.time == Pair(predicted=15.0, measured=15.0)
    assert comparison.outside_seconds == 0.0
    assert [stage.busy.measured for stage in comparison.stages] == [12.0, 12.0]
    assert comparison.stages[0].update is None
    assert not (comparison.measured.kinds == Kind.U).any()


def test_a_run_without_updates_is_set_against_the_plan_up_to_its_last_backward() -> None:
    plan = _plan()
    comparison = compare(plan, made_run(plan, plan_timeline(_plan(update=False))))
    assert comparison.time == Pair(predicted=15.0, measured=15.0)
    assert not (comparison.predicted.kinds == Kind.U).any()


def test_waiting_for_a_transfer_is_exposed_communication() -> None:
    """1 s for every transfer: stage 1 waits for F0, and in 1f1b-sno both wait in every turn."""
    plan = _plan(size=1.0)
    comparison = compare(plan, _record(plan, slower=3.0))
    predicted = plan_timeline(plan).exposed_communication()
    assert min(predicted) > 0
    for row in comparison.stages:
        assert row.exposed is not None
        assert row.exposed.predicted == predicted[row.rank]
        assert row.exposed.measured == pytest.approx(3 * predicted[row.rank])
    unknown = compare(plan, replace(_record(plan), transfers=None))
    assert all(row.exposed is None for row in unknown.stages)
    assert unknown.links == ()


def test_replicas_have_a_row_each_and_their_all_reduce() -> None:
    """
    rank 0   0F0 0F2 0B0 0B2  A 0U     the replicas of stage 0 reduce for 3 s once both have their last gradient
    rank 1   0F1 0F3 0B1 0B3  A 0U
    rank 2   stage 1
    """
    schedule = with_update(capped(2, 4, [4, 1], replicas=[2, 1]))
    plan = _plan(schedule=schedule, accelerators=((0, 1), (2,)), all_reduce=(3.0, 0.0))
    timeline = plan_timeline(plan)
    record = made_run(plan, timeline)
    # Rank 0 has its gradients first and counts the waiting for rank 1 as part of its all-reduce.
    assert timeline.end[(timeline.ranks == 0) & (timeline.kinds == Kind.B)].max() < (
        timeline.end[(timeline.ranks == 1) & (timeline.kinds == Kind.B)].max()
    )
    early = tuple(
        replace(event, start=event.start - 1) if (event.action, event.rank) == ("0A", 0) else event
        for event in record.events
    )
    for one in (record, replace(record, events=early)):
        comparison = compare(plan, one)
        assert [(row.stage, row.rank) for row in comparison.stages] == [(0, 0), (0, 1), (1, 2)]
        assert [row.all_reduce for row in comparison.stages] == [
            Pair(predicted=3.0, measured=3.0),
            Pair(predicted=3.0, measured=3.0),
            None,
        ]
        assert [row.in_flight.measured for row in comparison.stages] == [2.0, 2.0, 1.0]
        assert [row.busy.measured for row in comparison.stages] == [7.0, 7.0, 13.0]
    unrecorded = tuple(event for event in record.events if event.action != "0A")
    comparison = compare(plan, replace(record, events=unrecorded))
    assert comparison.stages[0].all_reduce is None
    assert comparison.time.error == 0


def test_a_rank_with_several_stages_has_a_row_for_each() -> None:
    schedule = with_update(interleaved(2, 4))
    plan = _plan(schedule=schedule, accelerators=((0,), (1,), (0,), (1,)))
    record = made_run(plan, plan_timeline(plan))
    comparison = compare(plan, record)
    assert [(row.stage, row.rank) for row in comparison.stages] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    for row in comparison.stages:
        assert row.forward == Pair(predicted=1.0, measured=1.0)
        assert row.busy == Pair(predicted=26.0, measured=26.0)
        assert row.update == Pair(predicted=2.0, measured=2.0)
    assert [row.in_flight.measured for row in comparison.stages] == [
        float(count) for count in plan_timeline(plan).peak_in_flight()
    ]


def test_recomputation_and_the_parts_of_a_backward_stand_apart() -> None:
    plan = _plan(schedule=with_update(with_recompute(make_schedule("zb-h1", 2, 4))))
    timeline = plan_timeline(plan)
    for slower, kind in ((2.0, Kind.R), (3.0, Kind.I), (4.0, Kind.W)):
        own = timeline.kinds == kind
        timeline = replace(timeline, end=np.where(own, timeline.start + slower * timeline.work, timeline.end))
    for row in compare(plan, made_run(plan, timeline)).stages:
        assert row.recompute == Pair(predicted=1.0, measured=2.0)
        assert row.input_gradient == Pair(predicted=1.0, measured=3.0)
        assert row.weight_gradient == Pair(predicted=1.0, measured=4.0)
        assert row.backward == Pair(predicted=2.0, measured=7.0)


def test_only_allocated_memory_has_an_error() -> None:
    plan = _plan()
    record = replace(_record(plan), peak_memory=(8, 400))
    assert [row.memory.error for row in compare(plan, record).stages] == [None, None]
    mixed = replace(record, memory_source=("allocated", "resident"))
    first, second = (row.memory for row in compare(plan, mixed).stages)
    assert (first.predicted, first.measured, first.error) == (10.0, 8, pytest.approx(0.25))
    assert (second.predicted, second.measured, second.source, second.error) == (10.0, 400, "resident", None)
    unknown = replace(record, peak_memory=(None, None), memory_source=("allocated", "allocated"))
    assert [row.memory.error for row in compare(plan, unknown).stages] == [None, None]


def test_nothing_measured_has_no_error() -> None:
    assert Pair(predicted=1.0, measured=0.0).error is None


def _shown(comparison: Comparison) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        for table in comparison_tables(comparison):
            console.print(table)
        for note in comparison_notes(comparison):
            console.print(note, soft_wrap=True)
    return capture.get()


def test_the_tables_show_both_and_the_error() -> None:
    plan = _plan(size=1.0)
    record = replace(_record(plan, slower=2.0), peak_memory=(8, 20_000), memory_source=("allocated", "resident"))
    text = _shown(compare(plan, record))
    assert "│     0 │ 1 → 2 s (-50%) │ 2 → 4 s (-50%) │     2 → 2 │" in text
    assert "│     0 │ 1 → 2 s (-50%) │" in text
    assert "optimizer" in text
    assert "10 → 8 B (+25%)" in text
    assert "10 B → –" in text
    assert "the median of the run" in text
    assert "up to 20 kB" in text
    assert "link within nodes: 1 B take 1 → 2 s (-50%), median of 4 transfers that a rank waited for" in text
    assert "; corrected: 0.5 B/s, 0 ns" in text


def test_units_that_differ_are_both_named() -> None:
    plan = _plan()
    text = _shown(compare(plan, _record(plan, slower=0.01)))
    assert "1 s → 10 ms (+9900%)" in text


def test_replicas_and_shared_ranks_are_named_in_the_tables() -> None:
    schedule = with_update(capped(2, 4, [4, 1], replicas=[2, 1]))
    plan = _plan(schedule=schedule, accelerators=((0, 1), (2,)), all_reduce=(3.0, 0.0))
    text = _shown(compare(plan, made_run(plan, plan_timeline(plan))))
    assert "│     0 │    1 │" in text
    assert "all-reduce" in text
    assert "3 → 3 s (+0%)" in text
    plan = _plan(schedule=with_update(interleaved(2, 4)), accelerators=((0,), (1,), (0,), (1,)))
    text = _shown(compare(plan, made_run(plan, plan_timeline(plan))))
    assert "optimizer of the rank" in text
    assert "│    1 │   1, 3 │" in text


def test_plain_values_have_every_pair_with_its_error() -> None:
    plan = _plan(size=1.0)
    values = comparison_values(compare(plan, replace(_record(plan, slower=2.0), memory_source=("allocated",) * 2)))
    assert json.loads(json.dumps(values, allow_nan=False)) == values
    assert values["time"]["error"] == pytest.approx(-0.5)
    stage = values["stages"][1]
    assert stage["forward"] == {"predicted": 1.0, "measured": 2.0, "error": -0.5}
    assert stage["memory"] == {"predicted": 10.0, "measured": None, "source": "allocated", "error": None}
    assert stage["recompute"] is None
    assert values["links"][0]["link"] == "within"
    assert set(values) == {
        "schedule", "stages", "links", "bubble", "step", "time", "overhead", "step_seconds", "outside_seconds",
    }  # fmt: skip


def test_a_run_of_another_plan_is_refused() -> None:
    plan = _plan()
    with pytest.raises(BaPipeError, match=r"the run is of plan .*; give the plan that was run"):
        compare(replace(plan, optimizer="adam"), _record(plan))


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda events: tuple(event for event in events if event.rank == 0),
            "the run has fewer 1F0 on rank 1 than the plan, which has 1, not 0",
        ),
        (lambda events: (*events, events[0]), "has more 0F0 on rank 0 than the plan, which has 1, not 2"),
        (
            lambda events: (*events, replace(events[0], action="7F9")),
            "more 7F9 on rank 0 than the plan, which has 0, not 1",
        ),
        (lambda events: (*events, replace(events[0], action="1U")), "more 1U on rank 0"),
        (lambda events: (*events, replace(events[0], action="9999999B999999999")), "9999999B999999999"),
    ],
)
def test_a_run_that_did_something_else_is_refused(
    change: Callable[[tuple[EventRecord, ...]], tuple[EventRecord, ...]], message: str
) -> None:
    plan = _plan()
    record = _record(plan)
    with pytest.raises(BaPipeError, match=message):
        compare(plan, replace(record, events=change(record.events), transfers=None))
