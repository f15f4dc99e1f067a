"""What every order is made with: sizes that make sense, and the lane of one stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bapipe.errors import BaPipeError
from bapipe.schedule.actions import IntArray, Kind, Lane, Schedule

__all__ = ["one_f_one_b_lane", "one_stage_lane", "pipeline_schedule", "require_sizes"]


def require_sizes(num_stages: int, num_microbatches: int) -> None:
    """Refuse a pipeline without stages or a global batch without micro-batches."""
    if num_stages < 1:
        raise BaPipeError(f"a pipeline needs at least 1 stage, got {num_stages}; raise --stages")
    if num_microbatches < 1:
        raise BaPipeError(
            f"a global batch needs at least 1 micro-batch, got {num_microbatches}; raise --micro-batches"
        )


def one_stage_lane(rank: int, stage: int, kinds: IntArray, microbatches: IntArray, name: str = "compute") -> Lane:
    """Actions of one stage only."""
    return Lane(rank, kinds, np.full(len(kinds), stage, dtype=np.int64), microbatches, name)


def one_f_one_b_lane(rank: int, stage: int, cap: int, microbatches: np.ndarray) -> Lane:
    """`F × min(m, K−1)`, then F and B in turn, then the remaining B, over the given micro-batches."""
    count = len(microbatches)
    warm = min(count, cap - 1)
    steady_end = 2 * count - warm
    kinds = np.full(2 * count, int(Kind.B), dtype=np.int64)
    order = np.empty(2 * count, dtype=np.int64)
    kinds[:warm] = Kind.F
    order[:warm] = microbatches[:warm]
    kinds[warm:steady_end:2] = Kind.F
    order[warm:steady_end:2] = microbatches[warm:]
    order[warm + 1 : steady_end : 2] = microbatches[: count - warm]
    order[steady_end:] = microbatches[count - warm :]
    return one_stage_lane(rank, stage, kinds, order)


def pipeline_schedule(
    actions: Sequence[Sequence[tuple[int, int]] | IntArray],
    num_microbatches: int,
    *,
    name: str,
    caps: Sequence[int],
) -> Schedule:
    """One stage per rank, with its actions in order: kind and micro-batch."""
    lanes = []
    for stage, own in enumerate(actions):
        table = np.array(own, dtype=np.int64).reshape(-1, 2)
        lanes.append(one_stage_lane(stage, stage, table[:, 0].copy(), table[:, 1].copy()))
    return Schedule(
        name=name,
        num_stages=len(lanes),
        num_microbatches=num_microbatches,
        placement=tuple((stage,) for stage in range(len(lanes))),
        lanes=tuple(lanes),
        caps=tuple(caps),
    )
