"""glibc's allocator on CPU ranks: freed memory is kept for the next tensor instead of going back to the system.

By default large blocks are mapped anew and the heap's top is given back whenever it is free, so a step that makes
and frees the same activations again and again takes a page fault for every page of them. On two CPU ranks a step
took 1.3 times as long for it, and its time varied by a fifth.
"""

from __future__ import annotations

import ctypes
import os
import sys

__all__ = ["keep_heap"]

_MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD = -3, -1, -2
"""parameters of mallopt(3)"""
_LARGEST_BLOCK = 32 * 2**20
"""the most that glibc takes as the size from which on blocks are mapped by themselves"""
_KEPT = 2**31 - 1
"""bytes at the heap's top that stay"""
_GROWTH = 64 * 2**20
"""bytes by which the heap grows beyond what is asked for"""


def keep_heap() -> bool:
    """Keep freed memory in this process; False where that is not glibc, or the environment sets MALLOC_*."""
    if not sys.platform.startswith("linux") or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    wanted = ((_MMAP_THRESHOLD, _LARGEST_BLOCK), (_TRIM_THRESHOLD, _KEPT), (_TOP_PAD, _GROWTH))
    return sum(int(mallopt(name, value)) for name, value in wanted) == len(wanted)
