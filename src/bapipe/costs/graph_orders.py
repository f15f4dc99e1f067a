"""Orders of a branched graph: the row of nodes that a pipeline can be cut best from.

A cut of a DAG is a set of nodes with all that comes before them. A row allows the cuts between its nodes alone, so
that which row is taken decides how even stages may be. Where such sets are few, as in networks whose branches join
again soon, all are looked at, as PipeDream's optimizer does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["MOST_CUTS", "best_row"]

MOST_CUTS = 1200
"""sets of nodes that are looked at; a graph with more keeps its row"""
_WORTH = 1e-3
"""share by which the slowest stage or transfer must become faster for another row"""

Floats = NDArray[np.float64]


def best_row(
    row: Sequence[str],
    after: Mapping[str, Sequence[str]],
    *,
    work: Mapping[str, float],
    sizes: Mapping[str, float],
    stages: int,
    bandwidth: float,
) -> list[str]:
    """The nodes of `row` in an order whose best cut into up to `stages` has the fastest bottleneck.

    The bottleneck is the slowest stage's work or transfer, at `bandwidth`. `sizes` are of what each node makes,
    `after` its readers. The row itself where no other is faster, or where there are more than `MOST_CUTS` cuts.
    Cost: O(cuts² · stages).
    """
    index = {name: place for place, name in enumerate(row)}
    readers = [sum(1 << index[target] for target in set(after[name])) for name in row]
    cuts = _cuts(row, readers)
    if cuts is None:
        return list(row)
    seconds = np.array([work[name] for name in row])
    crossing = np.array([sizes[name] for name in row]) / bandwidth
    inside = np.array([[cut >> place & 1 for place in range(len(row))] for cut in cuts], np.float64)
    read_later = np.array(
        [[bool(own & ~cut) and bool(cut >> place & 1) for place, own in enumerate(readers)] for cut in cuts],
        np.float64,
    )
    done, sends = inside @ seconds, read_later @ crossing
    follows = (inside @ (1 - inside).T) == 0  # [one, other]: all nodes of one are in the other
    np.fill_diagonal(follows, False)
    found, chosen = _bottleneck(follows, done, sends, stages)
    plain = [position for position, cut in enumerate(cuts) if _is_prefix(cut)]
    kept, _ = _bottleneck(follows[np.ix_(plain, plain)], done[plain], sends[plain], stages)
    if found > (1 - _WORTH) * kept:
        return list(row)
    order: list[str] = []
    taken = 0
    for position in chosen:
        order += [name for place, name in enumerate(row) if (cuts[position] & ~taken) >> place & 1]
        taken = cuts[position]
    return order


def _is_prefix(cut: int) -> bool:
    """Whether the set is the first nodes of the row."""
    return cut & (cut + 1) == 0


def _cuts(row: Sequence[str], readers: Sequence[int]) -> list[int] | None:
    """Every set of nodes that holds all that comes before them, as bits, the smallest first; None: too many."""
    needs = [0] * len(row)
    for place, own in enumerate(readers):
        for target in range(len(row)):
            if own >> target & 1:
                needs[target] |= 1 << place
    found, last = {0: None}, [0]
    while last:
        grown: dict[int, None] = {}
        for cut in last:
            for place, need in enumerate(needs):
                if not cut >> place & 1 and need & ~cut == 0:
                    grown[cut | 1 << place] = None
        found.update(grown)
        if len(found) > MOST_CUTS:
            return None
        last = list(grown)
    return list(found)


def _bottleneck(follows: NDArray[np.bool_], done: Floats, sends: Floats, stages: int) -> tuple[float, list[int]]:
    """The fastest bottleneck of up to so many stages from the empty cut, the first, to the last, and its cuts."""
    count = len(done)
    stage = np.where(follows, np.maximum(done[None, :] - done[:, None], sends[:, None]), np.inf)
    best = np.full(count, np.inf)
    best[0] = 0.0
    steps: list[NDArray[np.int64]] = []
    answer, depth = np.inf, 0
    for number in range(min(stages, count - 1)):
        through = np.maximum(best[:, None], stage)
        before = through.argmin(axis=0)
        best = through[before, np.arange(count)]
        steps.append(before)
        if best[-1] < answer * (1 - 1e-12):
            answer, depth = float(best[-1]), number + 1
    chosen, at = [count - 1], count - 1
    for before in reversed(steps[1:depth]):
        at = int(before[at])
        chosen.append(at)
    return answer, chosen[::-1]
