"""Orders made for the times of their stages: right, within memory, and as long as they say."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapipe.schedule.actions import Kind, Schedule
from bapipe.schedule.generators import zb_h1, zb_h2
from bapipe.schedule.list_schedule import Preference, StageTimes, timed_order
from bapipe.schedule.validate import check
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.simulate import simulate
from example_counts import examples

PREFERENCES = tuple(
    Preference(forward_first=first, gap=gap) for first, gap in product((True, False), (0.0, 0.5, 1.0))
)
EQUAL = StageTimes(
    forward=1.0, input_gradient=1.0, weight_gradient=1.0, send_forward=0.0, send_backward=0.0, cap=16
)


def simulated(schedule: Schedule, stages: list[StageTimes]) -> float:
    """As if nothing had to be sent."""
    costs = Costs.of(
        len(stages),
        forward=[item.forward for item in stages],
        backward=[item.input_gradient + item.weight_gradient for item in stages],
        weight_gradient=[item.weight_gradient for item in stages],
    )
    return simulate(schedule, costs).time


def most_held(schedule: Schedule, stages: list[StageTimes]) -> list[float]:
    peaks = []
    for lane, times in zip(schedule.lanes, stages, strict=True):
        live = waiting = 0
        peak = 0.0
        for action in lane:
            live += {Kind.F: 1, Kind.I: -1, Kind.B: -1}.get(action.kind, 0)
            waiting += {Kind.I: 1, Kind.W: -1}.get(action.kind, 0)
            peak = max(peak, live * times.inflight + waiting * times.delayed)
        peaks.append(peak)
    return peaks


seconds = st.integers(0, 8).map(lambda number: number / 4)
stage_times = st.builds(
    StageTimes,
    forward=seconds.map(lambda value: value + 0.25),
    input_gradient=seconds.map(lambda value: value + 0.25),
    weight_gradient=seconds,
    send_forward=seconds,
    send_backward=seconds,
    cap=st.integers(1, 8),
    inflight=st.integers(1, 3).map(float),
    delayed=st.integers(0, 4).map(float),
    room=st.integers(8, 30).map(float),
)


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(stage_times, min_size=1, max_size=5), st.integers(1, 9), st.sampled_from(PREFERENCES))
def test_any_order_is_right_and_keeps_to_its_memory(
    stages: list[StageTimes], count: int, preference: Preference
) -> None:
    schedule, time = timed_order(stages, count, preference)
    assert check(schedule) == []
    for peak, item in zip(most_held(schedule, stages), stages, strict=True):
        assert peak <= max(item.room, item.inflight, item.delayed)
    for lane, item in zip(schedule.lanes, stages, strict=True):
        live = [0]
        for action in lane:
            live.append(live[-1] + {Kind.F: 1, Kind.I: -1, Kind.B: -1}.get(action.kind, 0))
        assert max(live) <= item.cap
    assert time >= simulated(schedule, stages) - 1e-9
    free = [replace(item, send_forward=0.0, send_backward=0.0) for item in stages]
    schedule, time = timed_order(free, count, preference)
    assert simulated(schedule, free) == pytest.approx(time)


@pytest.mark.parametrize("count", [4, 8, 16])
def test_equal_stages_gain_what_the_known_patterns_do(count: int) -> None:
    stages = [EQUAL] * 4
    best = min(timed_order(stages, count, preference)[1] for preference in PREFERENCES)
    assert best <= min(simulated(order(4, count), stages) for order in (zb_h1, zb_h2))


def test_a_backward_without_weight_gradients_is_done_whole() -> None:
    stages = [EQUAL, replace(EQUAL, weight_gradient=0.0), EQUAL]
    schedule, _ = timed_order(stages, 6, PREFERENCES[0])
    kinds = [{action.kind for action in lane} for lane in schedule.lanes]
    assert kinds == [{Kind.F, Kind.I, Kind.W}, {Kind.F, Kind.B}, {Kind.F, Kind.I, Kind.W}]
