"""Peaks of saved activations against a count event by event, also where actions take no time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapipe.schedule.actions import Kind, Schedule
from bapipe.schedule.generators import capped, fbp_as, gpipe, interleaved, with_recompute, with_update
from bapipe.schedule.zero_bubble import zb_h1
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.simulate import simulate
from bapipe.simulator.timeline import Timeline

SCHEDULES = [
    gpipe(3, 5),
    with_update(capped(3, 6, [3, 2, 1])),
    with_recompute(capped(3, 6, [4, 3, 1]), [0, 1]),
    with_update(capped(2, 7, [4, 2], replicas=[2, 1])),
    zb_h1(3, 5),
    interleaved(2, 4),
    fbp_as(3, 5),
    fbp_as(3, 5, slots="static"),
]


def counted(
    timeline: Timeline, saved_activations: list[float], kept: list[float], delayed: list[float]
) -> list[float]:
    """Rank by rank: sort growths and releases by time, releases first, and add them up."""
    again = {int(stage) for stage in timeline.stages[timeline.kinds == Kind.R]}
    peaks = []
    for rank in range(timeline.num_ranks):
        events = []
        for kind, stage, own, start, end in zip(
            timeline.kinds, timeline.stages, timeline.ranks, timeline.start, timeline.end, strict=True
        ):
            held = kept[stage] if stage in again else saved_activations[stage]
            if own != rank:
                continue
            if kind == Kind.F:
                events.append((start, held))
            elif kind == Kind.R:
                events.append((start, saved_activations[stage] - held))
            elif kind == Kind.B:
                events.append((end, -saved_activations[stage]))
            elif kind == Kind.I:
                events.append((end, delayed[stage] - saved_activations[stage]))
            elif kind == Kind.W:
                events.append((end, -delayed[stage]))
        live = peak = 0.0
        for _, change in sorted(events):
            live += change
            peak = max(peak, live)
        peaks.append(peak)
    return peaks


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: f"{schedule.name}-{schedule.num_actions}")
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_peaks_are_those_of_the_events(schedule: Schedule, data: st.DataObject) -> None:
    stages = schedule.num_stages
    times = st.lists(st.sampled_from([1e-9, 1.0, 1.0, 2.5]), min_size=stages, max_size=stages)
    forward, backward, again = data.draw(times), data.draw(times), data.draw(times)
    again = [0.0 if value == 1e-9 else value for value in again]
    transfer = data.draw(st.sampled_from([0.0, 0.5]))
    costs = Costs.of(stages, forward=forward, backward=backward, transfer=transfer, recompute=again)
    timeline = simulate(schedule, costs)
    saved_activations = [float(2 + stage) for stage in range(stages)]
    kept = [1.0] * stages
    # More is held for weight gradients than before where gradients between the products outweigh what is let go.
    delayed = [float(data.draw(st.sampled_from([0.5, value, 2 * value]))) for value in saved_activations]
    held = saved_activations, kept, delayed
    assert timeline.peak_bytes_by_rank(*held) == pytest.approx(counted(timeline, *held), abs=1e-12)
    over_time = [float(max(0.0, values.max(initial=0.0))) for _, values in timeline.bytes_over_time(*held)]
    assert timeline.peak_bytes_by_rank(*held) == over_time
    assert timeline.peak_bytes_by_rank(saved_activations, kept) == timeline.peak_bytes_by_rank(
        saved_activations, kept, saved_activations
    )


def test_what_a_schedule_remembers_is_what_was_asked() -> None:
    base = capped(3, 4, [3, 2, 1])
    first, other = with_recompute(base, [0]), with_recompute(base, [1, 2])
    assert [int((lane.kinds == Kind.R).sum()) for lane in first.lanes] == [4, 0, 0]
    assert [int((lane.kinds == Kind.R).sum()) for lane in other.lanes] == [0, 4, 4]
    assert with_recompute(base, [0]) == first
    assert with_update(base) is with_update(base)
    assert not any(np.isin(lane.kinds, (Kind.R, Kind.U)).any() for lane in base.lanes)
