"""The steady state of a simulated pipeline: how long a global batch of more micro-batches takes, not simulated.

Orders such as 1F1B's repeat themselves: between filling and draining, each lane runs the same actions for the
next micro-batch, and an action waits only for actions of micro-batches that are at most `lag` away. So once the
times of enough micro-batches in a row are those of earlier ones plus a constant, they go on so until the pipeline
drains, and every `every` micro-batches more take `seconds` more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from bapipe.schedule.actions import Kind, Schedule
from bapipe.schedule.dealing import round_length
from bapipe.simulator.timeline import Timeline

__all__ = ["SteadyState", "lag_of", "microbatches_needed", "steady_state"]

_SAME = 1e-12
"""share of the makespan by which times that repeat themselves may differ, by rounding"""
_TURNS = (1, 2, 3, 4)
"""after how many rounds of all replicas a state may come back"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyState:
    """What repeats itself."""

    every: int
    """micro-batches after which all times repeat themselves"""
    seconds: float
    """by which they are later then"""

    def longer(self, more: int) -> float | None:
        """Seconds that so many micro-batches more take; None where they are no multiple of `every`."""
        rounds, rest = divmod(more, self.every)
        return None if rest else rounds * self.seconds


def lag_of(schedule: Schedule) -> int:
    """Micro-batches by which an action and the one before it on its lane differ at most; round of the replicas."""
    steps = [np.abs(np.diff(lane.microbatches[lane.microbatches >= 0])) for lane in schedule.lanes]
    most = max((int(step.max()) for step in steps if len(step)), default=0)
    return max(most, _round(schedule), 1)


def _round(schedule: Schedule) -> int:
    """Micro-batches after which every stage's replicas have had their turn."""
    return math.lcm(
        *(round_length(schedule.dealing_of(stage), len(ranks)) for stage, ranks in enumerate(schedule.placement))
    )


def microbatches_needed(schedule: Schedule) -> int:
    """Micro-batches with which an order of this lag can be seen to repeat itself, if it does at once."""
    lag = lag_of(schedule)
    return 4 * lag + 2 + max(_TURNS) * _round(schedule)


def steady_state(schedule: Schedule, timeline: Timeline) -> SteadyState | None:
    """What the schedule's steady state repeats, by its timeline; None where no repetition is to be seen.

    The same order of more micro-batches must continue this one's between filling and draining, as those of
    `capped` and `zero_bubble` do. Compared are all starts of the last 2 · lag + 2 micro-batches before the
    pipeline begins to drain with those before them: a round of each lane that far holds all that later times
    depend on.
    """
    lag, span = lag_of(schedule), _round(schedule)
    window, last = 2 * lag + 2, schedule.num_microbatches - lag
    starts = _starts(timeline)
    for turns in _TURNS:
        every = turns * span
        first = last - window - every
        if first < lag:
            return None
        later = starts[:, last - window : last] - starts[:, first : last - every]
        known = later[np.isfinite(later)]
        if len(known) and known.max() - known.min() <= _SAME * timeline.makespan:
            return SteadyState(every=every, seconds=float(known.mean()))
    return None


def _starts(timeline: Timeline) -> np.ndarray:
    """[stage and kind, micro-batch] when each action starts; NaN where there is none."""
    found = np.full((timeline.num_stages * len(Kind), timeline.num_microbatches), np.nan)
    own = timeline.microbatches >= 0
    rows = timeline.stages[own] * len(Kind) + timeline.kinds[own]
    found[rows, timeline.microbatches[own]] = timeline.start[own]
    return found
