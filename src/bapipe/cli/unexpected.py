"""What a user sees of an error that nobody expected: one line, and a file with all that a report of it needs."""

from __future__ import annotations

import os
import platform
import sys
import sysconfig
import tempfile
import traceback
from pathlib import Path

from bapipe import __file__ as bapipe_file
from bapipe import __version__

__all__ = ["BUG_EXIT", "SHOW_TRACEBACK", "bug_line"]

BUG_EXIT = 3
"""exit code of a command that ended by an unexpected error"""
SHOW_TRACEBACK = "BAPIPE_TRACEBACK"
"""environment variable; 1: the traceback is printed, and no file is written"""


def bug_line(error: BaseException) -> str:
    """One line that says what happened, where its traceback is, and what to do.

    The traceback goes into a new file of the temporary folder, which only this user can read: it has the command
    line, and paths and names of the user's. Where no file can be written, and where SHOW_TRACEBACK is set, it is
    printed. An error from code that is neither ours nor a library's is the user's model, and said to be.
    """
    said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    theirs = _raised_in_users_code(error)
    if theirs is None:
        what = f"this is a bug in BaPipe, not in what you gave: {said}; please report it"
    else:
        what = f"your code failed at {theirs}: {said}; correct it, or report it if it is right"
    path = None if os.environ.get(SHOW_TRACEBACK, "0") not in ("", "0") else _written(error)
    if path is None:
        traceback.print_exception(error)
        return f"{what} with the lines above"
    return f"{what} with {path}, which has the command and the traceback ({SHOW_TRACEBACK}=1 prints it)"


def _raised_in_users_code(error: BaseException) -> str | None:
    """File and line of the innermost code that is no library's, if it is not ours either."""
    ours = Path(bapipe_file).parent
    libraries = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        file = Path(frame.filename)
        if file.is_relative_to(ours):
            return None
        if file.is_absolute() and not any(file.is_relative_to(library) for library in libraries):
            return f"{file}:{frame.lineno}"
    return None


def _written(error: BaseException) -> str | None:
    """The file that holds the details; None where none can be written."""
    lines = [
        f"bapipe {__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"command: {sys.argv!r}",
        "",
        "".join(traceback.format_exception(error)),
    ]
    try:
        handle, path = tempfile.mkstemp(prefix="bapipe-bug-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write("\n".join(lines))
    except OSError:
        return None
    return path
