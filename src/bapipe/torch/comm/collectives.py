"""Collectives by their names in every torch, and the size of the buckets that gradients are summed in."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

__all__ = ["BUCKET_BYTES", "all_gather", "reduce_scatter"]

BUCKET_BYTES = 25 * 2**20
"""as torch's DistributedDataParallel"""


def _collective(name: str, before: str) -> Callable[..., dist.Work | None]:
    """A collective by the name that it has from torch 2.13 on, or the one before."""
    found: Callable[..., dist.Work | None] = getattr(dist, name, None) or getattr(dist, before)
    return found


reduce_scatter = _collective("reduce_scatter_single", "reduce_scatter_tensor")
all_gather = _collective("all_gather_single", "all_gather_into_tensor")
