"""Whose turn it is on a machine: settings are prepared at the same time and measured one after another.

To build, capture, plan and compile a model takes minutes of processors and seconds of the GPU; what is measured
takes it alone. Uses no torch.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

__all__ = ["VARIABLE", "Turn"]

VARIABLE = "BAPIPE_TURN"
"""of the environment, by which a rank is told the file"""

_TRY = 0.02
"""seconds between two tries"""


class Turn:
    """A file that one process holds at a time; also given back where the process ends."""

    def __init__(self, path: Path | str | None) -> None:
        """None: nobody else measures, and it is always one's turn."""
        self._path = path
        self._file: int | None = None

    def take(self) -> None:
        """Wait until it is this process's turn."""
        if self._path is None or self._file is not None:
            return
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_TRY)
        self._file = file

    def leave(self) -> None:
        """Give it back, if it is held."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
