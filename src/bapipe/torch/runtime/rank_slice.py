"""A rank on a slice of a GPU: it takes the slice that its plan has for it before CUDA starts in its process."""

from __future__ import annotations

import itertools
import os

import torch

from bapipe.errors import BaPipeError
from bapipe.hardware.slice_types import slice_share
from bapipe.records.plan import Plan
from bapipe.torch import slices

__all__ = ["take_slice"]

_ON_SLICE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"


def take_slice(plan: Plan, rank: int, device: str | None) -> None:
    """Set this process's environment for the slice that the plan has for the rank.

    Nothing happens where the plan has a whole accelerator for it, where the run is on CPUs, or where CUDA already
    runs. A process that was started on a slice stays there. A slice's environment has an NCCL_HOSTID, which ranks
    on whole GPUs must not have: NCCL takes ranks with another one for other hosts, and uses neither NVLink nor
    shared memory between them.
    """
    name = plan.ranks[rank]
    types = {item.name: item.type for item in plan.cluster.accelerators}
    share = slice_share(types[name])
    if share is None or (device is not None and not device.startswith("cuda")) or _cuda_runs():
        return
    number = int(index) if (index := name.rpartition("/")[2]).isdigit() else rank
    if _ON_SLICE not in os.environ:
        os.environ.update(_environment(number, share, types[name]))


def _cuda_runs() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _environment(number: int, share: float, type_: str) -> dict[str, str]:
    """Slices are counted over this machine's GPUs."""
    left = number
    for gpu in itertools.count():
        cut = slices.status(gpu)
        if cut is None:
            break
        if left < len(cut):
            found = cut.percentages[left]
            if abs(found - share) > 0.5:
                raise BaPipeError(
                    f"the plan has {type_} where slice {number} has {found:g} %; cut the GPU as planned "
                    "(bapipe slices start), or plan for the slices there are"
                )
            return slices.slice_environment(cut, left)
        left -= len(cut)
    raise BaPipeError(
        f"the plan is for slices of a GPU ({type_}), and there is no slice {number} here; start them with bapipe "
        f"slices start --count {max(1, round(100 / share))}, or give --device cpu"
    )
