"""Planning PipeDream: only when asked for, its updates and versions counted; compared steady with steady."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bapipe.analysis.predicted_measured import compare
from bapipe.analysis.recalibrate import recalibrate
from bapipe.costs.profile import Profile, read_profile
from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import Accelerator
from bapipe.hardware.cluster_file import read_cluster
from bapipe.io.files import content_hash
from bapipe.planner import Request, explore, make_plan
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.records.plan import Plan
from bapipe.records.run_record import EventRecord, RunRecord, StepRecord, read_run
from bapipe.schedule.actions import Kind
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.steady_period import steady_period
from paths import REPOSITORY

EXAMPLES = REPOSITORY / "examples"


def _profile() -> Profile:
    return read_profile(EXAMPLES / "tiny-profile.json")


def _plan(stages: int = 2, **request: object) -> Plan:
    cluster = read_cluster(str(EXAMPLES / "cluster-two-cpus.toml"))
    kind = cluster.accelerators[0].type
    names = [f"localhost/{rank}" for rank in range(stages)]
    ranks = tuple(Accelerator(name=name, type=kind, node="localhost") for name in names)
    wanted = Request(global_batch=64, microbatch=8, stages=stages, **request)  # type: ignore[arg-type]
    return make_plan(explore(_profile(), replace(cluster, accelerators=ranks), wanted))


def test_it_must_be_asked_for() -> None:
    free = _plan()
    assert free.schedule.flushes
    assert not any("pipedream" in alternative.name for alternative in free.alternatives)
    asked = _plan(schedule="pipedream")
    assert asked.schedule.name == "pipedream"
    assert not asked.schedule.flushes


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_time_is_steady_periods_with_an_update_each(stages: int) -> None:
    plan = _plan(stages, schedule="pipedream", strategy="pipedream")
    tables = _profile().at("cpu-core", 8)
    spans = [slice(stage.first_layer, stage.last_layer + 1) for stage in plan.stages]
    for stage, span in zip(plan.stages, spans, strict=True):
        expected = float((tables.backward + tables.update)[span].sum())
        assert np.isclose(stage.backward, expected)
        assert stage.update == 0
    slowest = max(stage.forward + stage.backward for stage in plan.stages)
    assert plan.prediction.time >= plan.microbatches * slowest * (1 - 1e-12)
    assert plan_timeline(plan).time == pytest.approx(plan.prediction.time)
    schedule = plan.schedule.to_schedule()
    assert not any((lane.kinds == Kind.U).any() for lane in schedule.lanes)
    # Without transfers the period is that of the slowest stage, update included.
    nothing = (0.0,) * (stages - 1)
    costs = Costs(
        forward=tuple(stage.forward for stage in plan.stages),
        backward=tuple(stage.backward for stage in plan.stages),
        send_forward=nothing,
        send_backward=nothing,
        input_gradient=(0.0,) * stages,
        weight_gradient=(0.0,) * stages,
        recompute=(0.0,) * stages,
        all_reduce=(0.0,) * stages,
        update=(0.0,) * stages,
    )
    assert steady_period(schedule, costs) == pytest.approx(slowest)


def test_memory_has_the_versions() -> None:
    """Stage i holds N − i versions of its weights, N − i − 1 more than 1F1B, which saves as many activations."""
    one, other = _plan(4, schedule="pipedream", strategy="time"), _plan(4, schedule="1f1b-sno", strategy="time")
    for stage, (mine, plain) in enumerate(zip(one.stages, other.stages, strict=True)):
        assert (mine.first_layer, mine.last_layer) == (plain.first_layer, plain.last_layer)
        assert mine.memory_bytes - plain.memory_bytes == pytest.approx((3 - stage) * mine.weight_bytes)


def _run_of(plan: Plan, *, seconds: float) -> RunRecord:
    """A run in which every action took what was planned, and every step so many seconds."""
    timeline = plan_timeline(plan)
    events = tuple(
        EventRecord(
            rank=int(rank),
            action=f"{stage}{Kind(int(kind)).name}{microbatch}",
            start=float(start),
            end=float(end),
        )
        for rank, stage, kind, microbatch, start, end in zip(
            timeline.ranks,
            timeline.stages,
            timeline.kinds,
            timeline.microbatches,
            timeline.start,
            timeline.end,
            strict=True,
        )
    )
    return replace(
        read_run(EXAMPLES / "run.json"),
        plan_hash=content_hash(plan),
        steps=tuple(StepRecord(step=step, loss=1.0, seconds=seconds) for step in range(3)),
        recorded_step=1,
        events=events,
        transfers=None,
        weight_versions=tuple(range(len(plan.stages), 0, -1)),
    )


def test_steady_is_compared_with_steady() -> None:
    plan = _plan(schedule="pipedream")
    seconds = 1.25 * plan.prediction.time
    found = compare(plan, _run_of(plan, seconds=seconds))
    assert found.time.predicted == pytest.approx(plan.prediction.time)
    assert found.time.measured == pytest.approx(seconds)
    assert found.outside_seconds == pytest.approx(0, abs=1e-12)
    for row in found.stages:
        assert row.backward.error == pytest.approx(0)
        assert row.in_flight.predicted == row.in_flight.measured == len(plan.stages) - row.stage
        assert row.exposed is None
        assert row.bubble.measured == pytest.approx(1 - row.busy.measured / seconds)


def test_such_a_run_cannot_correct_a_profile() -> None:
    plan = _plan(schedule="pipedream")
    with pytest.raises(BaPipeError, match="times backward and optimizer step together"):
        recalibrate(plan, _run_of(plan, seconds=1.0), _profile())
