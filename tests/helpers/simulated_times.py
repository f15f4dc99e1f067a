"""A timeline as a table from action to its seconds, which a test writes out by hand."""

from __future__ import annotations

from bapipe.schedule.actions import Action, Kind
from bapipe.simulator.timeline import Timeline

__all__ = ["starts", "times"]


def starts(timeline: Timeline) -> dict[str, float]:
    """Action -> start. Of replicas' A and U the last one counts."""
    return {name: start for name, (start, _) in times(timeline).items()}


def times(timeline: Timeline) -> dict[str, tuple[float, float]]:
    found = {}
    for index in range(len(timeline.kinds)):
        microbatch = int(timeline.microbatches[index])
        kind = Kind(int(timeline.kinds[index]))
        action = Action(int(timeline.stages[index]), kind, None if microbatch < 0 else microbatch)
        found[str(action)] = (float(timeline.start[index]), float(timeline.end[index]))
    return found
