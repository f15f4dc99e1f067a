"""Partitions without replicas as cuts: what every partition step shares.

`cuts[i]` is the last unit of stage i; the last entry is always the last unit. `rows[i]` is stage i's row in the
chain's time arrays.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from bapipe.costs.segments import Chain
from bapipe.costs.stage_time import UnitSeconds

__all__ = ["Cuts", "hill_climb", "prefix_work", "stage_times", "starts"]

Cuts = tuple[int, ...]


def prefix_work(chain: Chain) -> list[list[float]]:
    """Per type, units + 1 running sums of forward plus backward; lists, because they are read one by one."""
    sums = np.cumsum(UnitSeconds.of(chain).work, axis=1)
    return [[0.0, *row] for row in sums.tolist()]


def starts(cuts: Sequence[int]) -> list[int]:
    """First unit of each stage."""
    return [0, *(cut + 1 for cut in cuts[:-1])]


def stage_times(prefix: Sequence[Sequence[float]], rows: Sequence[int], cuts: Sequence[int]) -> list[float]:
    """Forward plus backward of each stage, per micro-batch, from `prefix_work`."""
    times, first = [], 0
    for row, last in zip(rows, cuts, strict=True):
        times.append(prefix[row][last + 1] - prefix[row][first])
        first = last + 1
    return times


def hill_climb(
    cuts: Sequence[int],
    score: Callable[[Cuts], tuple[float, ...]],
    allowed: Sequence[bool] | None = None,
    *,
    first: Callable[[Cuts], float] | None = None,
) -> Cuts:
    """Move one cut at a time to the next allowed place while that lowers the score.

    Stages never become empty. Ends in a local optimum: each accepted move lowers the score, so it terminates.
    `first` is the score's first entry where that is cheaper and settles most moves.
    """
    best = tuple(cuts)
    value = score(best)
    places = [place for place in range(best[-1]) if allowed is None or allowed[place]]
    improved = True
    while improved:
        improved = False
        for index in range(len(best) - 1):
            for moved in _neighbours(best, index, places):
                trial = (*best[:index], moved, *best[index + 1 :])
                if first is not None and first(trial) > value[0]:
                    continue
                trial_value = score(trial)
                if trial_value < value:
                    best, value, improved = trial, trial_value, True
    return best


def _neighbours(cuts: Cuts, index: int, places: list[int]) -> list[int]:
    """The nearest allowed places below and above a cut that keep its stages non-empty; `places` ascend."""
    low, at, high = cuts[index - 1] if index else -1, cuts[index], cuts[index + 1]
    below, above = bisect_left(places, at) - 1, bisect_right(places, at)
    found = [places[below]] if below >= 0 and places[below] > low else []
    if above < len(places) and places[above] < high:
        found.append(places[above])
    return found
