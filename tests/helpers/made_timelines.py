"""Timelines to draw: simulated schedules by name, and dense ones of any size."""

from __future__ import annotations

import numpy as np

from bapipe.schedule.generators import make_schedule
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.simulate import simulate
from bapipe.simulator.timeline import Timeline, Transfers


def predicted(
    name: str,
    num_stages: int,
    num_microbatches: int,
    *,
    forward: float = 1,
    backward: float = 2,
    transfer: float = 0,
) -> Timeline:
    """A schedule with the same costs on every stage; interleaved has two stages a rank."""
    costs = Costs.of(num_stages, forward=forward, backward=backward, transfer=transfer)
    if name == "interleaved":
        costs = costs.split(2)
    return simulate(make_schedule(name, num_stages, num_microbatches), costs)


def dense(num_ranks: int, num_microbatches: int, *, later: float = 0.0) -> Timeline:
    """Every rank runs all its F and B in turn without a pause, each rank so much later than the one before."""
    per_rank = 2 * num_microbatches
    rank = np.repeat(np.arange(num_ranks), per_rank)
    position = np.tile(np.arange(per_rank), num_ranks)
    start = later * rank + position // 2 * 3.0 + position % 2
    duration = 1.0 + position % 2
    return Timeline(
        num_ranks=num_ranks,
        num_stages=num_ranks,
        num_microbatches=num_microbatches,
        kinds=position % 2,
        stages=rank,
        microbatches=position // 2,
        ranks=rank,
        lanes=np.zeros(len(rank), np.int64),
        start=start,
        end=start + duration,
        work=duration,
        transfers=Transfers.none(),
    )
