"""A lock on a folder of checkpoints: two runs never write into one. Imports no torch.

The system holds it for the process, and lets go of it when the process ends in whatever way: none is left over. On
a disk of several hosts it holds between them if the file system passes locks on, as NFS does unless it is mounted
with local_lock.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
import weakref
from pathlib import Path

from bapipe.errors import BaPipeError

try:
    import fcntl
except ImportError:  # a system without
    fcntl = None  # type: ignore[assignment]

__all__ = ["LOCK", "FolderLock"]

LOCK = ".lock"
_PATIENCE = 10.0
"""seconds: a run that was killed just now may still be ending"""
_held: dict[str, tuple[int, int]] = {}
"""folder -> handle of its lock, and how many in this process hold it"""


class FolderLock:
    """Held until `release`, or until nothing refers to it. One process may have several of one folder."""

    def __init__(self, folder: str | Path, *, patience: float = _PATIENCE) -> None:
        """Makes the folder. BaPipeError if another process holds it, OSError if the disk has no locks."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        key = os.path.realpath(folder)
        handle, count = _held.get(key, (None, 0))
        if handle is None:
            handle = _taken(Path(folder), patience)
        _held[key] = (handle, count + 1)
        self._release = weakref.finalize(self, _let_go, key, os.getpid())

    def release(self) -> None:
        self._release()


def _taken(folder: Path, patience: float) -> int:
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        end = time.monotonic() + patience
        while not _lock(handle):
            if time.monotonic() >= end:
                raise BaPipeError(
                    f"another run writes into {folder}: {_holder(handle)}; wait for it, end it, or give another "
                    "folder"
                )
            time.sleep(0.05)
        about = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        }
        os.ftruncate(handle, 0)
        os.pwrite(handle, (json.dumps(about) + "\n").encode(), 0)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _lock(handle: int) -> bool:
    if fcntl is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _holder(handle: int) -> str:
    """Who wrote the lock file, in words."""
    try:
        about = json.loads(os.pread(handle, 1000, 0))
        return f"process {about['pid']} on {about['host']}, since {about['started']}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"which one is not said in {LOCK}"


def _let_go(key: str, process: int) -> None:
    if os.getpid() != process:
        return
    handle, count = _held.pop(key)
    if count > 1:
        _held[key] = (handle, count - 1)
    else:
        os.close(handle)


def _forget() -> None:
    """In a process that was forked off: the lock is its parent's, whose end must free it."""
    for handle, _ in _held.values():
        with contextlib.suppress(OSError):
            os.close(handle)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
