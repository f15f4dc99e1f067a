"""Other orders of one schedule are timed as the simulator times them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bapipe.errors import BaPipeError, DeadlockError
from bapipe.schedule.actions import Kind, Lane, Schedule
from bapipe.schedule.generators import with_update
from bapipe.schedule.zero_bubble import zero_bubble
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.lowering import Network, Route
from bapipe.simulator.reordered import Order, ReorderedSchedule
from bapipe.simulator.simulate import simulate

RANKS, MICROBATCHES = 3, 5
COSTS = Costs.of(RANKS, forward=[2.0, 3.0, 1.5], backward=[4.0, 5.0, 3.5], transfer=1.25, update=0.5)


def made() -> Schedule:
    return with_update(zero_bubble(RANKS, MICROBATCHES, caps=[3, 2, 1], delays=[0, 1, 2]))


def swapped(graph: ReorderedSchedule, order: Order, generator: np.random.Generator) -> Order:
    """Two neighbours of a lane change places, of another kind and micro-batch each."""
    kinds, microbatches = graph.lowered.kinds, graph.lowered.microbatches
    while True:
        lanes = [list(lane) for lane in order]
        lane = lanes[generator.integers(len(lanes))]
        place = int(generator.integers(len(lane) - 1))
        one, other = lane[place : place + 2]
        if kinds[one] != kinds[other] <= Kind.W and microbatches[one] != microbatches[other]:
            lane[place : place + 2] = other, one
            return tuple(tuple(own) for own in lanes)


def as_schedule(schedule: Schedule, graph: ReorderedSchedule, order: Order) -> Schedule:
    lanes = (Lane(own.rank, *row, own.name) for own, row in zip(schedule.lanes, graph.lanes(order), strict=True))
    return replace(schedule, lanes=tuple(lanes))


def test_its_own_order_takes_as_long_as_simulated() -> None:
    schedule = made()
    graph, timeline = ReorderedSchedule(schedule, COSTS, Network()), simulate(schedule, COSTS)
    times = graph.timed(graph.order)
    assert times is not None
    assert times.seconds == timeline.time
    assert times.start.tolist() == timeline.start.tolist()


@pytest.mark.parametrize("uplink", [False, True])
def test_any_order_takes_as_long_as_simulated(uplink: bool) -> None:
    """Two hundred steps of one swap each; those that wait for themselves are said to."""
    schedule, generator, stuck = made(), np.random.default_rng(7), 0
    network = Network()
    if uplink:
        pairs = [(0, 1), (1, 0), (1, 2), (2, 1)]
        network = Network(
            routes={own: Route(seconds_per_unit=1.5, latency=0.25, uplinks=(("rack", 0.75),)) for own in pairs}
        )
    graph = ReorderedSchedule(schedule, COSTS, network)
    order = graph.order
    for _ in range(200):
        changed = swapped(graph, order, generator)
        times = graph.timed(changed)
        if times is None:
            stuck += 1
            with pytest.raises(DeadlockError):
                simulate(as_schedule(schedule, graph, changed), COSTS, network)
            continue
        timeline = simulate(as_schedule(schedule, graph, changed), COSTS, network)
        assert times.seconds == timeline.time
        order = changed
    assert 0 < stuck < 150
    assert order != graph.order


def test_what_an_action_waits_for_ends_before_it() -> None:
    graph = ReorderedSchedule(made(), COSTS, Network())
    times = graph.timed(graph.order)
    assert times is not None
    ready = np.where(np.isnan(times.arrival), times.end, times.arrival)
    waits = graph.waits_for()
    assert any(waits)
    for task, others in enumerate(waits):
        assert all(ready[other] <= times.start[task] + 1e-12 for other in others)


def test_sends_that_block_are_not_reordered() -> None:
    with pytest.raises(BaPipeError, match="do not block"):
        ReorderedSchedule(made(), COSTS, Network(sending="blocking"))
