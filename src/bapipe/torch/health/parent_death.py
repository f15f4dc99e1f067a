"""A process that does not outlive the one that started it. Imports no torch.

On Linux the kernel ends it (PR_SET_PDEATHSIG), at once and whatever it is at; elsewhere, and in a user's own
script, a thread looks twice a second whether the parent is still the same. The kernel's signal comes when the
*thread* that started the process ends: `bapipe run` waits for its ranks in the thread that started them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["end_with_parent", "noted_parent", "watch_parent", "write_parent"]

_parent = os.getppid()
"""the process that started this one; its number when this module was imported"""
_PR_SET_PDEATHSIG = 1
_FILE = "launcher"
_LOOK = 0.5
"""seconds between two looks at the parent"""
_watched = threading.Lock()
"""taken once a thread looks at the parent"""


def end_with_parent(parent: int | None = None) -> None:
    """From now on this process is killed when its parent ends; at once if that has gone, or is not `parent`."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            prctl = ctypes.CDLL(None).prctl
            prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The kernel's signal is only for what happens from now on.
    if os.getppid() != (_parent if parent is None else parent):
        _end()
    watch_parent(_end)


def write_parent(process: int, folder: Path) -> None:
    """Leave for ranks, in the launcher's folder for notes, the number of the process that starts them."""
    (folder / _FILE).write_text(str(process), encoding="ascii")


def noted_parent(arguments: Sequence[str]) -> int | None:
    """What `write_parent` wrote in the folder that a rank is given by `--notes`; None if it is given none.

    Where the folder is no more, 0, which is nobody's parent: the launcher removes it when the ranks have ended.
    """
    if "--notes" not in arguments[:-1]:
        return None
    try:
        return int((Path(arguments[arguments.index("--notes") + 1]) / _FILE).read_text(encoding="ascii"))
    except (ValueError, OSError):
        return 0


def watch_parent(gone: Callable[[], None]) -> None:
    """Have `gone` called, in a thread, when the parent has ended; only the first call in a process counts."""
    if not _watched.acquire(blocking=False):
        return

    def look() -> None:
        while os.getppid() == _parent:
            time.sleep(_LOOK)
        gone()

    threading.Thread(target=look, name="bapipe parent", daemon=True).start()


def _end() -> None:
    os._exit(1)


def _forked() -> None:
    """A process that is forked from this one has another parent, and no thread that looks at it."""
    global _parent, _watched
    _parent, _watched = os.getppid(), threading.Lock()


os.register_at_fork(after_in_child=_forked)
