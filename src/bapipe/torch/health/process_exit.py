"""How a rank of a run that failed ends: its line reported, its files gone, and no wait for what will never
come."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from bapipe.torch.health.failure import Failure, RunError
from bapipe.torch.health.rank_status import Status, progress_file

__all__ = [
    "FAILED",
    "PREFIX",
    "clear_files",
    "hide_reported_errors",
    "is_file_of",
    "leave",
    "log_failure",
    "on_leaving",
    "own_file",
    "print_failure",
]

PREFIX = "bapipe-rank-"
"""how the names of files begin in which ranks keep what they are at"""
FAILED: list[Failure] = []
"""why this process is to end; once it is not empty the process ends with its code"""
_files: list[Path] = []
_last_actions: list[Callable[[], None]] = []
_LAST_SECONDS = 5.0
"""in which what `on_leaving` was given must be done"""
_hidden = False
_logger = logging.getLogger(__name__)


def print_failure(failure: Failure, rank: int) -> None:
    """The line on standard error; what every rank was at is said only by the one who noticed."""
    table = f"{failure.table}\n" if failure.table and failure.by == rank else ""
    sys.stderr.write(f"bapipe: {failure.line}\n{table}")
    sys.stderr.flush()


def log_failure(failure: Failure, rank: int) -> None:
    """As `print_failure`, in the log of whoever uses the library."""
    table = f"\n{failure.table}" if failure.table and failure.by == rank else ""
    _logger.error("%s%s", failure.line, table)


def own_file(process: str) -> Path:
    """A file for what a rank is at, where nobody gave it one; `clear_files` removes it.

    Its name has that of the process, so that others know whose it is.
    """
    handle, name = tempfile.mkstemp(prefix=_prefix(process))
    os.close(handle)
    _files.append(Path(name))
    return Path(name)


def is_file_of(status: Status, own: Path | None) -> bool:
    """Whether the file that a rank says it keeps what it is at in is that rank's, where this rank's is `own`.

    The name comes from a store that others may write to. So it must be in the same folder, and have the name that
    the launcher gives it or that `own_file` gives to the file of that process.
    """
    path = Path(status.progress)
    if own is None or path.parent != own.parent:
        return False
    return path == progress_file(own.parent, status.rank) or path.name.startswith(_prefix(status.process))


def _prefix(process: str) -> str:
    return f"{PREFIX}{process.replace(' ', '-')}-"


def clear_files() -> None:
    """Remove what `own_file` made."""
    while _files:
        _files.pop().unlink(missing_ok=True)


def on_leaving(action: Callable[[], None]) -> None:
    """Have something done, once, before the process ends by `leave`, which waits a few seconds for it."""
    if action not in _last_actions:
        _last_actions.append(action)


def leave(code: int) -> None:
    """End the process at once, from any thread."""
    clear_files()
    if _last_actions:
        last = threading.Thread(target=lambda: [action() for action in _last_actions], daemon=True)
        last.start()
        last.join(_LAST_SECONDS)
    with contextlib.suppress(OSError, ValueError):  # who read it may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def hide_reported_errors() -> None:
    """An uncaught RunError that has been reported needs no traceback; the hook that is there shows all others."""
    global _hidden
    if _hidden:
        return
    _hidden = True
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not (isinstance(error, RunError) and error.reported):
            before(kind, error, trace)

    sys.excepthook = hook


def _leave_failed() -> None:
    """Receives that are still posted would be waited for when the process group goes, perhaps for ever."""
    if FAILED:
        leave(FAILED[0].code)


# Registered on import, and so run after what the user's script registers.
atexit.register(_leave_failed)
