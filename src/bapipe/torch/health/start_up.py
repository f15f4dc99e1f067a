"""Python's search for unreachable objects, kept away from what a process loads at its start. Imports no torch.

torch and its tracer make more than a million objects that stay for good. Looked through again and again while they
are made, they take a fifth of the start of a rank, and each full search of the training that follows would go
through them, too.
"""

from __future__ import annotations

import gc

__all__ = ["begin_loading", "end_loading"]


def begin_loading() -> None:
    """Before the imports of a process: no searches until `end_loading`."""
    gc.disable()


def end_loading() -> None:
    """After them: what is there stays for good, and what comes is searched as usual."""
    gc.freeze()
    gc.enable()
