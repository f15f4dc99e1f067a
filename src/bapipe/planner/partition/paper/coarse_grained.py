"""Coarse-grained partition (the paper's second step): cut only where little enough crosses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bapipe.costs.segments import Chain
from bapipe.errors import BaPipeError
from bapipe.planner.partition.paper.inter_layer import inter_layer
from bapipe.planner.partition.paper.stage_cuts import Cuts, prefix_work, stage_times

__all__ = ["coarse_grained", "communication_bound"]

TransferTime = Callable[[int], float]
"""seconds that the cut after a unit keeps its link busy per micro-batch"""


def communication_bound(chain: Chain, rows: Sequence[int], cuts: Cuts, transfer: TransferTime) -> bool:
    """Whether some cut's transfers take longer than the longest stage computes."""
    longest = max(stage_times(prefix_work(chain), rows, cuts))
    return any(transfer(cut) > longest for cut in cuts[:-1])


def coarse_grained(
    chain: Chain, rows: Sequence[int], transfer: TransferTime, start: Cuts
) -> tuple[Cuts, float, int]:
    """Merge layers between cuts whose transfer exceeds T, and balance what is left.

    The threshold is a_th = bandwidth × T: a cut is kept if what crosses it is sent within T. T starts as the
    longest stage of `start`; coarser stages are longer, so T grows until both agree. Returns the cuts,
    the threshold as seconds and the number of coarse layers.
    """
    prefix = prefix_work(chain)
    limit = max(stage_times(prefix, rows, start))
    places = sorted(transfer(unit) for unit in range(len(chain) - 1))
    if len(rows) - 1 > len(places):
        raise BaPipeError(
            f"{len(rows)} stages need {len(rows) - 1} cuts, the model has {len(places)}; lower --stages"
        )
    while True:
        if len(rows) > 1:
            limit = max(limit, places[len(rows) - 2])
        allowed = [transfer(unit) <= limit for unit in range(len(chain) - 1)]
        cuts = inter_layer(chain, rows, allowed)
        longest = max(stage_times(prefix, rows, cuts))
        if longest <= limit:
            return cuts, limit, sum(allowed) + 1
        more = [value for value in places if limit < value <= longest]
        if not more:
            return cuts, limit, sum(allowed) + 1
        limit = longest
