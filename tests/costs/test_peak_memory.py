"""The memory of a rank against a count action by action."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapipe.costs.peak_memory import PeakBytes, message_bytes, rank_peaks
from bapipe.costs.stage_memory import StageBytes
from bapipe.schedule.actions import Kind, Schedule
from bapipe.schedule.generators import capped, gpipe, interleaved, pipedream, with_recompute, with_update
from bapipe.schedule.zero_bubble import zb_h1
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.simulate import simulate
from bapipe.simulator.timeline import Timeline

SCHEDULES = [
    gpipe(3, 5),
    with_update(capped(3, 6, [3, 2, 1])),
    capped(2, 7, [4, 2], replicas=[3, 1]),
    capped(2, 8, [6, 4], replicas=[2, 3]),
    with_recompute(capped(3, 6, [4, 3, 1]), [0, 1]),
    capped(1, 8, [4], replicas=[4]),
    pipedream(3, 6),
    zb_h1(3, 5),
    interleaved(2, 4),
]
NONE = StageBytes(**dict.fromkeys((field.name for field in fields(StageBytes)), 0.0))
COMPUTE = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)


def counted(schedule: Schedule, timeline: Timeline, needed: list[StageBytes], again: list[bool]) -> list[float]:
    """Go through each rank's actions and add up what there is."""
    transfers, consumers = timeline.transfers, timeline.consumers()
    versions = schedule.weight_versions or (1,) * len(needed)
    peaks = []
    for rank in range(timeline.num_ranks):
        here = [index for index in range(len(timeline.kinds)) if timeline.ranks[index] == rank]
        own = sorted((i for i in here if timeline.kinds[i] in COMPUTE), key=lambda index: timeline.start[index])
        stages = schedule.stages_of(rank)
        frozen = sum(needed[stage].weights - needed[stage].trained for stage in stages)
        held = frozen + sum(needed[stage].trained * (1 + versions[stage]) for stage in stages)
        targets: set[tuple[int, int, bool]] = set()
        for stage in stages:
            for microbatch in range(schedule.num_microbatches):
                if schedule.rank_of(stage, microbatch) != rank:
                    continue
                if stage + 1 < len(needed):
                    targets.add((stage, schedule.rank_of(stage + 1, microbatch), True))
                if stage:
                    targets.add((stage, schedule.rank_of(stage - 1, microbatch), False))
        held += sum(2 * (needed[stage].sent if onward else needed[stage].answered) for stage, _, onward in targets)
        coming: dict[tuple[int, int, int], list[tuple[int, float, float]]] = {}
        for index in range(len(transfers)):
            source, consumer = int(transfers.source[index]), int(consumers[index])
            if transfers.to_rank[index] == rank and consumer >= 0:
                stage, kind = int(timeline.stages[source]), int(timeline.kinds[source])
                size = needed[stage].sent if kind == Kind.F else needed[stage].answered
                wire = (int(timeline.ranks[source]), kind, stage)
                coming.setdefault(wire, []).append((own.index(consumer), float(transfers.arrival[index]), size))
        activations = most = 0.0
        made: set[int] = set()
        for place, index in enumerate(own):
            stage, kind = int(timeline.stages[index]), timeline.kinds[index]
            item = needed[stage]
            waiting = 0.0
            for messages in coming.values():
                messages.sort()
                for number, (taken, arrival, size) in enumerate(messages):
                    posted = timeline.start[own[messages[number - 2][0]]] if number >= 2 else 0.0
                    if taken > place and max(arrival, posted) < timeline.end[index]:
                        waiting += size
            if kind == Kind.F:
                activations += item.kept if again[stage] else item.saved_activations
            if kind == Kind.R:
                activations += item.saved_activations - item.kept
            makes = kind in (Kind.B, Kind.W)
            anew = makes and (stage not in made or not schedule.flushes)
            if kind in (Kind.F, Kind.R):
                besides = item.forward_workspace
            elif kind == Kind.W:
                besides = item.first_weight_workspace if anew else item.weight_workspace
            else:
                besides = item.first_backward_workspace if anew else item.backward_workspace
            if makes:
                made.add(stage)
            absent = sum(needed[other].trained for other in stages if other not in made)
            casts = sum(needed[other].casts for other in stages)
            most = max(most, casts + activations + besides + waiting - absent)
            if kind == Kind.B:
                activations -= item.saved_activations
            if kind == Kind.I:
                activations += item.delayed - item.saved_activations
            if kind == Kind.W:
                activations -= item.delayed
        peaks.append(held + most)
    return peaks


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: f"{schedule.name}-{schedule.num_actions}")
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_memory_is_followed_from_action_to_action(schedule: Schedule, data: st.DataObject) -> None:
    count = schedule.num_stages
    figures = st.lists(st.integers(1, 9).map(float), min_size=count, max_size=count)
    forward, backward, send = data.draw(figures), data.draw(figures), data.draw(figures)
    costs = Costs.of(count, forward=forward, backward=backward, transfer=send[1:])
    drawn = {field.name: data.draw(figures) for field in fields(StageBytes)}
    needed = [StageBytes(**{name: values[stage] for name, values in drawn.items()}) for stage in range(count)]
    needed = [
        replace(
            item,
            trained=min(item.trained, item.weights),
            kept=min(item.kept, item.saved_activations),
            received=needed[stage - 1].sent if stage else 0.0,
            returned=needed[stage + 1].answered if stage + 1 < count else 0.0,
            first_backward_workspace=item.backward_workspace - 1.0,
            first_weight_workspace=item.weight_workspace - 1.0,
            workspace=max(item.forward_workspace, item.backward_workspace, item.weight_workspace),
        )
        for stage, item in enumerate(needed)
    ]
    timeline = simulate(schedule, costs)
    again = [bool(((timeline.kinds == Kind.R) & (timeline.stages == stage)).any()) for stage in range(count)]
    parts = rank_peaks(schedule, timeline, needed, copies=2, update_copies=2, phases_known=True)
    found = [peak.total for peak in parts]
    assert found == pytest.approx(counted(schedule, timeline, needed, again), rel=1e-12)
    most = [
        peak.total
        for peak in rank_peaks(schedule, timeline, needed, copies=2, update_copies=2, phases_known=False)
    ]
    assert all(one <= other + 1e-9 for one, other in zip(found, most, strict=True))


def test_messages_count_once_for_every_peer() -> None:
    """Three replicas before one: it receives from three, and answers three; each of them has one to do with."""
    needed = [replace(NONE, sent=5.0, returned=7.0), replace(NONE, received=5.0, answered=7.0)]
    assert message_bytes(capped(2, 6, [3, 1], replicas=[3, 1]), needed) == [2 * (5 + 7), 2 * 3 * (5 + 7)]
    assert message_bytes(capped(2, 6, [4, 4], replicas=[4, 2]), needed) == [2 * (5 + 7), 2 * 2 * (5 + 7)]
    assert message_bytes(capped(2, 6, [3, 2], replicas=[3, 2]), needed) == [2 * 2 * (5 + 7), 2 * 3 * (5 + 7)]


def test_the_parts_of_a_peak_are_those_of_its_moment() -> None:
    """One stage of 10 bytes of weights, which is fullest in the second forward, a backward or the update."""
    schedule = with_update(gpipe(1, 2))
    timeline = simulate(schedule, Costs.of(1, forward=[1.0], backward=[1.0]))
    held = replace(NONE, weights=10.0, trained=10.0, saved_activations=30.0)

    def peak(*, update_copies: int = 3, **needed: float) -> PeakBytes:
        stages = [replace(held, **needed)]
        told = {"copies": 3, "update_copies": update_copies, "phases_known": True}
        (found,) = rank_peaks(schedule, timeline, stages, **told)  # type: ignore[arg-type]
        return found

    always = {"weights": 10.0, "optimizer": 10.0, "buffers": 0.0}
    forward = peak(forward_workspace=20.0)
    assert forward == PeakBytes(**always, gradients=0.0, activations=60.0, workspace=20.0), "no gradients yet"
    backward = peak(backward_workspace=5.0, first_backward_workspace=-4.0)
    assert backward == PeakBytes(**always, gradients=6.0, activations=60.0, workspace=0.0), "not all of them yet"
    assert peak(saved_activations=1.0, update_copies=7) == PeakBytes(
        **always, gradients=10.0, activations=0.0, workspace=40.0
    )
