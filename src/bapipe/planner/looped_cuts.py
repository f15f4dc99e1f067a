"""Cuts for accelerators that have several stages each: all are to be done with a micro-batch after as long."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from bapipe.costs.segments import Chain
from bapipe.costs.stage_time import UnitSeconds
from bapipe.hardware.cluster import Cluster
from bapipe.planner.local_moves import moved_cuts

__all__ = ["Cuts", "balanced_ranks", "fastest_first", "looped_bound"]

Cuts = tuple[int, ...]
"""the last unit of each stage"""
_MOVES = 2_000
"""moves of the cuts that are outlined at once"""


def fastest_first(chain: Chain, cluster: Cluster, ranks: int) -> tuple[int, ...]:
    """So many accelerators, the fastest first; those that are as fast as the cluster lists them."""
    whole = UnitSeconds.of(chain).work.sum(axis=1)
    seconds = [float(whole[chain.row(item.type)]) for item in cluster.accelerators]
    return tuple(sorted(range(len(cluster)), key=lambda index: (seconds[index], index))[:ranks])


@functools.lru_cache(maxsize=32)
def balanced_ranks(chain: Chain, ranks: tuple[int, ...], rows: tuple[int, ...], microbatches: int) -> Cuts:
    """Last units with which the ranks have as much to do, each with all its stages, and then the stages.

    `ranks` has the rank of every stage and `rows` the chain's row of every rank's type. From cuts at which stages
    take as much as the rank is fast, by all moves that shorten an outline of the time: what the busiest rank does
    in all micro-batches, and the longest stage once per rank.
    """
    done = _done(UnitSeconds.of(chain).work)
    of_stage, own_rows = np.array(ranks), np.array([rows[rank] for rank in ranks])
    total = float(done[own_rows, -1].mean())
    on_rank = (of_stage[:, None] == np.arange(len(rows))).astype(np.float64)

    def outlines(cuts: NDArray[np.int64]) -> NDArray[np.float64]:
        own = _stage_work(done, own_rows, cuts)
        whole = microbatches * (own @ on_rank).max(axis=1) + len(rows) * own.max(axis=1)
        return np.asarray(whole + (own**2).sum(axis=1) / total, dtype=np.float64)

    # Each stage is to take the same share of its rank's time; a rank has as much work as it is fast.
    stages_of = np.bincount(of_stage)
    share = (done[own_rows[0], -1] * stages_of[of_stage[0]]) / (done[own_rows, -1] * stages_of[of_stage])
    along, last, count = np.cumsum(share)[:-1], len(chain) - 1, len(ranks)
    mean = done.mean(axis=0)
    wanted = np.searchsorted(mean[1:], mean[-1] * along / share.sum()).tolist()
    cuts: Cuts = ()
    for index, cut in enumerate([*wanted, last]):
        cuts += (max(index, cuts[-1] + 1 if cuts else 0, min(cut, last - (count - 1 - index))),)
    while True:
        moved = moved_cuts(cuts, most=_MOVES)
        times = outlines(np.array(moved, np.int64))
        best = int(times.argmin())
        if times[best] >= times[0]:
            return cuts
        cuts = moved[best]


def looped_bound(
    chain: Chain, ranks: tuple[int, ...], rows: tuple[int, ...], cuts: Cuts, microbatches: int
) -> float:
    """Seconds that no order of these stages beats.

    A rank can begin once a micro-batch has come to its first stage, has all its work to do, and those before that
    stage then still have their backwards.
    """
    own_rows, found, units = np.array([rows[rank] for rank in ranks]), 0.0, UnitSeconds.of(chain)
    work = _stage_work(_done(units.work), own_rows, np.array([cuts], np.int64))[0]
    for rank in range(len(rows)):
        own = [stage for stage, other in enumerate(ranks) if other == rank]
        found = max(found, float(work[: own[0]].sum()) + microbatches * float(work[own].sum()))
    return found


def _done(work: NDArray[np.float64]) -> NDArray[np.float64]:
    """[type, units] what the first so many units take."""
    return np.concatenate([np.zeros((len(work), 1)), np.cumsum(work, axis=1)], axis=1)


def _stage_work(
    done: NDArray[np.float64], rows: NDArray[np.int64], cuts: NDArray[np.int64]
) -> NDArray[np.float64]:
    """[case, stage] what each stage takes, on the type of its rank."""
    ends = cuts + 1
    begins = np.concatenate([np.zeros((len(cuts), 1), np.int64), ends[:, :-1]], axis=1)
    return np.asarray(done[rows, ends] - done[rows, begins], dtype=np.float64)
