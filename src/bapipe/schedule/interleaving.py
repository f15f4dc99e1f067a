"""Interleaved 1F1B: every rank has several stages, as many as the others or its own number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bapipe.errors import BaPipeError
from bapipe.schedule.actions import Kind, Lane, Schedule
from bapipe.schedule.channel_window import stops_at
from bapipe.schedule.inflight import interleaved_warm_up
from bapipe.schedule.lane_builders import one_f_one_b_lane, require_sizes
from bapipe.schedule.looped_order import LOOPED_CHOICES, LoopedStage, looped_order, looped_placement

__all__ = ["interleaved"]


def interleaved(num_ranks: int, num_microbatches: int, *, virtual: int | Sequence[int] = 2) -> Schedule:
    """Interleaved 1F1B: each rank holds `virtual` stages, stage c·N + r on rank r; bubble (N−1)(F+B)/v.

    Micro-batches go in groups of N: a group's forwards of all own stages, then the next group. Rank r warms up
    with 2(N−r−1) + (v−1)N forwards. A last group shorter than N is filled up in thought and its missing
    micro-batches are left out, so any M works; the bubble is least when N divides M.

    With a number for each rank, `looped_placement` has the stages, and the order is the shortest of those that are
    made for stages that all take as long (`looped_order`), within the activations of such a warm-up.
    """
    require_sizes(num_ranks, num_microbatches)
    counts = [virtual] * num_ranks if isinstance(virtual, int) else list(virtual)
    if len(counts) != num_ranks:
        raise BaPipeError(
            f"{num_ranks} ranks need {num_ranks} numbers of stages, got {len(counts)}; give --virtual one per rank"
        )
    if min(counts) < 1:
        raise BaPipeError(f"interleaving needs at least 1 stage per rank, got {min(counts)}; raise --virtual")
    if len(set(counts)) > 1:
        stages = [LoopedStage(rank=rank, forward=1.0, backward=2.0) for (rank,) in looped_placement(counts)]
        within = [choice for choice in LOOPED_CHOICES if choice.limit == 1]
        made = [looped_order(stages, num_microbatches, choice) for choice in within]
        return min(made, key=lambda order: (bool(stops_at(order[0])), order[1]))[0]
    return _in_groups(num_ranks, num_microbatches, counts[0])


def _in_groups(num_ranks: int, num_microbatches: int, virtual: int) -> Schedule:
    """The published order of as many stages on every rank."""
    groups = -(-num_microbatches // num_ranks)
    padded = groups * num_ranks
    position = np.arange(padded * virtual, dtype=np.int64)
    group, within = np.divmod(position, num_ranks * virtual)
    chunk, offset = np.divmod(within, num_ranks)
    microbatch = group * num_ranks + offset
    lanes = []
    for rank in range(num_ranks):
        warm = min(padded * virtual, interleaved_warm_up(num_ranks, rank, virtual))
        plan = one_f_one_b_lane(rank, 0, warm + 1, position)
        forward = plan.kinds == Kind.F
        chunks = np.where(forward, chunk[plan.microbatches], virtual - 1 - chunk[plan.microbatches])
        microbatches = microbatch[plan.microbatches]
        real = microbatches < num_microbatches
        lanes.append(
            Lane(rank, plan.kinds[real], (chunks * num_ranks + rank)[real], microbatches[real], "compute")
        )
    return Schedule(
        name="interleaved",
        num_stages=num_ranks * virtual,
        num_microbatches=num_microbatches,
        placement=tuple((stage % num_ranks,) for stage in range(num_ranks * virtual)),
        lanes=tuple(lanes),
    )
