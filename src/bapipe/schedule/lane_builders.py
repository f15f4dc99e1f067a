"""What every order is made with: sizes that make sense, and the lane of one stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bapipe.errors import BaPipeError
from bapipe.schedule.actions import IntArray, Lane, Schedule

__all__ = ["one_stage_lane", "pipeline_schedule", "require_sizes"]


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


def pipeline_schedule(
    actions: Sequence[Sequence[tuple[int, int]]], num_microbatches: int, *, name: str, caps: Sequence[int]
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
