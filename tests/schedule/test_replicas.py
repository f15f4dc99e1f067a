"""Pipelines side by side: each as it is alone, and the micro-batches dealt in turn."""

from __future__ import annotations

import pytest

from bapipe.errors import BaPipeError
from bapipe.schedule.actions import Schedule
from bapipe.schedule.generators import interleaved, make_schedule, with_update
from bapipe.schedule.replicas import replicated_pipelines
from bapipe.schedule.validate import require_valid
from bapipe.schedule.zero_bubble import zb_h1, zero_bubble
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.simulate import simulate


def actions(schedule: Schedule, rank: int) -> str:
    return " ".join(str(action) for lane in schedule.lanes if lane.rank == rank for action in lane)


@pytest.mark.parametrize("name", ["zb-h1", "zb-h2"])
@pytest.mark.parametrize(("stages", "microbatches", "count"), [(2, 5, 2), (3, 12, 3), (4, 8, 2), (2, 3, 3)])
def test_each_is_the_pipeline_alone(name: str, stages: int, microbatches: int, count: int) -> None:
    made = make_schedule(name, stages, microbatches, replicas=[count] * stages)
    require_valid(made)
    assert made.placement == tuple(tuple(range(i * count, (i + 1) * count)) for i in range(stages))
    for replica in range(count):
        own = list(range(replica, microbatches, count))
        alone = make_schedule(name, stages, len(own))
        for stage in range(stages):
            lane = next(lane for lane in made.lanes if lane.rank == stage * count + replica)
            numbers = [own[action.microbatch or 0] for action in alone.lanes[stage]]
            assert [action.microbatch for action in lane] == numbers
            assert [action.kind for action in lane] == [action.kind for action in alone.lanes[stage]]


def test_they_take_as_long_as_one_of_its_share_and_hold_as_much() -> None:
    costs = Costs.of(3, forward=[1.0, 2.0, 1.5], backward=[2.0, 3.0, 2.5], transfer=0.25)
    alone, both = simulate(zb_h1(3, 6), costs), simulate(make_schedule("zb-h1", 3, 12, replicas=[2, 2, 2]), costs)
    assert both.time == pytest.approx(alone.time)
    assert both.peak_in_flight() == [2 * live for live in alone.peak_in_flight()]


@pytest.mark.parametrize("name", ["interleaved", "zb-v", "v-half", "v-min"])
def test_pipelines_of_several_stages_per_rank_are_replicated(name: str) -> None:
    """Each replica takes what it takes alone, holds what it holds, and the check finds nothing wrong."""
    alone = make_schedule(name, 2, 3)
    both = make_schedule(name, 2, 6, replicas=[2, 2])
    assert both.placement == tuple((2 * rank, 2 * rank + 1) for (rank,) in alone.placement)
    require_valid(with_update(both))
    costs = Costs.of(4, forward=[2.0, 3.0, 2.5, 3.5], backward=[4.0, 5.0, 4.5, 6.0], weight_gradient=[1.0] * 4)
    one, two = simulate(alone, costs), simulate(both, costs)
    assert two.time == pytest.approx(one.time)
    assert two.peak_in_flight() == [2 * live for live in one.peak_in_flight()]


def test_their_sums_come_before_their_updates() -> None:
    made = with_update(make_schedule("zb", 2, 4, caps=[2, 1], replicas=[2, 2]))
    assert actions(made, 0) == "0F0 0F2 0I0 0W0 0I2 0W2 0U 0A"
    assert actions(made, 3) == "1F1 1I1 1F3 1I3 1W1 1W3 1U 1A"


@pytest.mark.parametrize(
    ("pipelines", "message"),
    [
        ([interleaved(2, 4), interleaved(3, 4)], "of one name and shape"),
        ([zb_h1(2, 4), zb_h1(2, 5)], "dealt in turn"),
        ([zb_h1(2, 4), zero_bubble(2, 4, [2, 1])], "of one name and shape"),
    ],
)
def test_others_are_refused(pipelines: list[Schedule], message: str) -> None:
    with pytest.raises(BaPipeError, match=message):
        replicated_pipelines(pipelines)


def test_replicas_of_zero_bubble_orders_are_alike() -> None:
    with pytest.raises(BaPipeError, match="make --replicas alike"):
        make_schedule("zb-h1", 2, 4, replicas=[2, 1])
    with pytest.raises(BaPipeError, match="raise --micro-batches"):
        make_schedule("zb-h2", 2, 2, replicas=[3, 3])
