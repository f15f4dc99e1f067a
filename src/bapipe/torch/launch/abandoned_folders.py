"""Folders that runs leave behind: a launcher that is killed cannot remove its own, so the next run does.

The name of a run's folder has number and start of its launcher. Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from pathlib import Path

from bapipe.torch.health.processes import has_ended, own_process

__all__ = ["folder_prefix", "remove_abandoned"]

_NAME = re.compile(r"bapipe-run-(\d+)-(\d+)-\w+")
"""number and start of the launcher"""


def folder_prefix() -> str:
    """How the name of a temporary folder of this process's run begins."""
    return f"bapipe-run-{own_process().replace(' ', '-')}-"


def remove_abandoned() -> None:
    """Remove the folders of this user's launchers that have ended, where temporary folders are."""
    with contextlib.suppress(OSError):
        for path in Path(tempfile.gettempdir()).iterdir():
            found = _NAME.fullmatch(path.name)
            if found is None or not has_ended(f"{found[1]} {found[2]}"):
                continue
            with contextlib.suppress(OSError):
                if path.lstat().st_uid == os.getuid() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
