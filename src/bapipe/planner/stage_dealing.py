"""How micro-batches are dealt to the replicas of a stage over several types of accelerators."""

from __future__ import annotations

from bapipe.costs.segments import Chain
from bapipe.costs.stage_time import stage_seconds
from bapipe.hardware.cluster import Cluster
from bapipe.planner.evaluate import StageChoice, replica_rows
from bapipe.schedule.dealing import Dealing, deal_by_speed

__all__ = ["dealing_by_speed"]


def dealing_by_speed(chain: Chain, stage: StageChoice, cluster: Cluster, microbatches: int) -> Dealing:
    """So many micro-batches by what each replica takes for one; empty where that is in turn."""
    rows = replica_rows(chain, stage, cluster)
    if len(set(rows)) == 1:
        return ()
    seconds = {row: stage_seconds(chain, [(stage.first, stage.last)], [{row}]) for row in set(rows)}
    again = {row: float(own.forward[0]) if stage.recompute else 0.0 for row, own in seconds.items()}
    return deal_by_speed([float(seconds[row].work[0]) + again[row] for row in rows], microbatches)
