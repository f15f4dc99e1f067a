"""What every order is made with: sizes that make sense, and the lane of one stage."""

from __future__ import annotations

import numpy as np

from bapipe.errors import BaPipeError
from bapipe.schedule.actions import IntArray, Lane

__all__ = ["one_stage_lane", "require_sizes"]


def require_sizes(num_stages: int, num_microbatches: int) -> None:
    """Refuse a pipeline without stages or a mini-batch without micro-batches."""
    if num_stages < 1:
        raise BaPipeError(f"a pipeline needs at least 1 stage, got {num_stages}; raise --stages")
    if num_microbatches < 1:
        raise BaPipeError(
            f"a mini-batch needs at least 1 micro-batch, got {num_microbatches}; raise --microbatches"
        )


def one_stage_lane(rank: int, stage: int, kinds: IntArray, microbatches: IntArray, name: str = "compute") -> Lane:
    """Actions of one stage only."""
    return Lane(rank, kinds, np.full(len(kinds), stage, dtype=np.int64), microbatches, name)
