"""Straight partitions as cuts: what every partition step shares.

`cuts[i]` is the last unit of stage i; the last entry is always the last unit. `rows[i]` is stage i's row in the
chain's time arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from bapipe.chain import Chain

__all__ = ["Cuts", "hill_climb", "prefix_work", "stage_times", "starts"]

Cuts = tuple[int, ...]


def prefix_work(chain: Chain) -> np.ndarray:
    """(types, units + 1) running sums of forward plus backward."""
    return np.concatenate([np.zeros((len(chain.types), 1)), np.cumsum(chain.work, axis=1)], axis=1)


def starts(cuts: Sequence[int]) -> list[int]:
    """First unit of each stage."""
    return [0, *(cut + 1 for cut in cuts[:-1])]


def stage_times(prefix: np.ndarray, rows: Sequence[int], cuts: Sequence[int]) -> list[float]:
    """Forward plus backward of each stage, per micro-batch."""
    return [
        float(prefix[row, last + 1] - prefix[row, first])
        for row, first, last in zip(rows, starts(cuts), cuts, strict=True)
    ]


def hill_climb(
    cuts: Sequence[int], score: Callable[[Cuts], tuple[float, ...]], allowed: Sequence[bool] | None = None
) -> Cuts:
    """Move one cut at a time to the next allowed place while that lowers the score.

    Stages never become empty. Ends in a local optimum: each accepted move lowers the score, so it terminates.
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
                trial_value = score(trial)
                if trial_value < value:
                    best, value, improved = trial, trial_value, True
    return best


def _neighbours(cuts: Cuts, index: int, places: list[int]) -> list[int]:
    """The nearest allowed places below and above a cut that keep its stages non-empty."""
    low = cuts[index - 1] if index else -1
    below = max((place for place in places if low < place < cuts[index]), default=None)
    above = min((place for place in places if cuts[index] < place < cuts[index + 1]), default=None)
    return [place for place in (below, above) if place is not None]
