"""Files in shared memory that ranks leave behind: their launcher removes them. Imports no torch.

torch and the CUDA driver share memory between processes through files in /dev/shm that are named after the process
that made them. A rank that is killed cannot remove its own, and the driver leaves those of memory that peers have
mapped even where a rank ends by itself.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

__all__ = ["left_files", "remove_left_files"]

_FOLDER = Path("/dev/shm")
_TORCH = re.compile(r"torch_(\d+)_\d+_\d+")
_DRIVER = re.compile(r"cuda\.shm\.[0-9a-f]+\.([0-9a-f]+)\.[0-9a-f]+")
"""user, process and count in hexadecimal"""


def _process_of(name: str) -> int | None:
    """The number of the process that made a file of that name; None where the name is nothing that we know."""
    if found := _TORCH.fullmatch(name):
        return int(found[1])
    if found := _DRIVER.fullmatch(name):
        return int(found[1], 16)
    return None


def left_files(processes: Collection[int], *, folder: Path = _FOLDER) -> Iterator[Path]:
    """Files of this user in shared memory that those of these processes made that have ended."""
    ended = {number for number in processes if not Path(f"/proc/{number}").exists()}
    with contextlib.suppress(OSError):
        for path in sorted(folder.iterdir()):
            with contextlib.suppress(OSError):
                if _process_of(path.name) in ended and path.lstat().st_uid == os.getuid():
                    yield path


def remove_left_files(processes: Collection[int], *, folder: Path = _FOLDER) -> None:
    """Remove what these processes, once they have ended, have left in shared memory."""
    for path in left_files(processes, folder=folder):
        with contextlib.suppress(OSError):
            path.unlink()
