"""Inter-layer partition (the paper's first step): balance compute alone, from the ideal T of equation (1)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bapipe.costs.segments import Chain
from bapipe.errors import BaPipeError
from bapipe.planner.partition.paper.stage_cuts import Cuts, hill_climb, prefix_work, stage_times

__all__ = ["ideal_time", "inter_layer"]


def ideal_time(whole: Sequence[float]) -> float:
    """Equation (1): T = 1 / Σ 1/T_n, where T_n is the whole network's time on accelerator n."""
    return 1.0 / sum(1.0 / time for time in whole)


def inter_layer(chain: Chain, rows: Sequence[int], allowed: Sequence[bool] | None = None) -> Cuts:
    """Fill each stage up to T, then move cuts while the times, longest first, get smaller.

    `allowed` restricts the places of cuts (coarse-grained partition). Refuses more stages than places permit.
    """
    count, units = len(rows), len(chain)
    places = [place for place in range(units - 1) if allowed is None or allowed[place]]
    if count - 1 > len(places):
        raise BaPipeError(
            f"{count} stages need at least {count - 1} places to cut, got {len(places)}; lower --stages"
        )
    prefix = prefix_work(chain)
    target = ideal_time([prefix[row][-1] for row in rows])
    cuts: list[int] = []
    first = 0
    for index, row in enumerate(rows[:-1]):
        # Leave a place for every later cut.
        candidates = [place for place in places if place >= first][: len(places)]
        later = count - 2 - index
        candidates = candidates[: len(candidates) - later] if later else candidates
        ends = np.array([prefix[row][place + 1] - prefix[row][first] for place in candidates])
        cuts.append(candidates[int(np.argmin(np.abs(ends - target)))])
        first = cuts[-1] + 1
    cuts.append(units - 1)

    def score(trial: Cuts) -> tuple[float, ...]:
        return tuple(sorted(stage_times(prefix, rows, trial), reverse=True))

    return hill_climb(cuts, score, allowed)
