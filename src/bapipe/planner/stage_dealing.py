"""How micro-batches are dealt to the replicas of a stage over several types of accelerators."""

from __future__ import annotations

from bapipe.costs.segments import Chain
from bapipe.costs.stage_time import stage_seconds
from bapipe.hardware.cluster import Cluster
from bapipe.planner.candidate import StageChoice
from bapipe.planner.candidate_costs import replica_rows
from bapipe.schedule.actions import Schedule
from bapipe.schedule.dealing import Dealing, deal_by_speed

__all__ = ["dealing_by_speed", "dealt_words"]


def dealing_by_speed(chain: Chain, stage: StageChoice, cluster: Cluster, microbatches: int) -> Dealing:
    """So many micro-batches by what each replica takes for one; empty where that is in turn."""
    rows = replica_rows(chain, stage, cluster)
    if len(set(rows)) == 1:
        return ()
    seconds = {row: stage_seconds(chain, [(stage.first, stage.last)], [{row}]) for row in set(rows)}
    again = {row: float(own.forward[0]) if stage.recompute else 0.0 for row, own in seconds.items()}
    return deal_by_speed([float(seconds[row].work[0]) + again[row] for row in rows], microbatches)


def dealt_words(schedule: Schedule) -> str:
    """How many micro-batches the replicas take of stages that do not deal in turn, such as "5-3 and 6-2"."""
    dealt = [stage for stage in range(schedule.num_stages) if schedule.dealing_of(stage)]
    return " and ".join(dict.fromkeys("-".join(map(str, schedule.microbatch_counts(stage))) for stage in dealt))
