"""How torch's allocator keeps a GPU's memory while plans run.

A plan may fill the memory nearly to its end, and for moments a layer wants gigabytes of it in one piece. In the
usual segments free memory lies in pieces between what is held; a convolution that is refused then takes an
algorithm which needs none, and torch remembers that one for the life of the process (VGG-16's largest backward:
twice as long). Segments of pages ("expandable") have no such pieces: a page that nothing lies on is free for
anything.

Memory in pages cannot be mapped by other processes everywhere (it takes the right to trace them), so what they map
comes from segments of the usual kind. Whoever has settings of their own (PYTORCH_ALLOC_CONF) keeps them.

Uses a private part of torch, written against 2.11 and 2.13.
"""

from __future__ import annotations

import os
import threading

import torch
from torch import Tensor

__all__ = ["keep_in_pages", "mappable"]

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_LARGE = 2**25
"""bytes that are not taken out of a segment for small things"""
_in_pages = threading.Event()
_switching = threading.Lock()


def keep_in_pages(device: torch.device) -> None:
    """From now on, for the whole process. Nothing happens on a CPU, where users have settings of their own, or
    where the driver has no pages to give."""
    if device.type != "cuda" or any(os.environ.get(name) for name in _SETTINGS):
        return
    with _switching:
        if _in_pages.is_set() or torch.cuda.get_allocator_backend() != "native":
            return
        _switch(on=True)
        try:
            _try(device)
        except RuntimeError:
            _switch(on=False)
        else:
            _in_pages.set()


def mappable(nbytes: int, device: torch.device) -> Tensor:
    """Uninitialised bytes that another process can map, for the current stream.

    They are from a pool of their own, which has no pages. Another thread that needs new memory at this moment gets
    none in pages either, which does no harm.
    """
    with _switching:
        if not _in_pages.is_set():
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
        _switch(on=False)
        try:
            with torch.cuda.use_mem_pool(torch.cuda.MemPool(), device):
                return torch.empty(nbytes, dtype=torch.uint8, device=device)
        finally:
            _switch(on=True)


def _try(device: torch.device) -> None:
    """Take new memory; a RuntimeError says that there is none of this kind."""
    torch.empty(_LARGE, dtype=torch.uint8, device=device)


def _switch(*, on: bool) -> None:
    torch._C._accelerator_setAllocatorSettings(f"expandable_segments:{on}")
