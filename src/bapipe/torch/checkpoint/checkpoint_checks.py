"""What is refused of a checkpoint folder before a run starts. Imports no torch."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from bapipe.errors import BaPipeError
from bapipe.torch.checkpoint.checkpoint_folder import checkpoints_of, disk_problem, latest, reason
from bapipe.torch.checkpoint.checkpoint_manifest import (
    UnknownSchemaError,
    UnreadableCheckpointError,
    read_manifest,
)
from bapipe.torch.checkpoint.checkpoint_options import Saving

__all__ = ["check_saving", "require_writable"]


def check_saving(saving: Saving, *, comparing: bool = False) -> None:
    """Refuse to start afresh beside another run's checkpoints, and to compare what was not all run here.

    And to go on where the last one is of a schema that this version does not know: it would be left behind; and to
    save into a folder that cannot be written.
    """
    found = latest(saving.folder)
    last = next(iter(checkpoints_of(saving.folder)), None)
    if last is not None and last != found:
        _refuse_unreadable(last, resume=saving.resume)
    if found is not None and not saving.resume:
        raise BaPipeError(
            f"{found} is a checkpoint of another run; give --resume to go on from it, or another folder"
        )
    if found is not None and comparing:
        raise BaPipeError("--check compares a run from its first step; leave it out with --resume")
    require_writable(saving.folder)


def _refuse_unreadable(last: Path, *, resume: bool) -> None:
    """A damaged one is passed over by a run that resumes, and said so."""
    try:
        read_manifest(last)
    except UnknownSchemaError as error:
        raise BaPipeError(
            f"{reason(error)}; it is not replaced: use the version that wrote it, or give another folder"
        ) from None
    except UnreadableCheckpointError as error:
        if not resume:
            raise BaPipeError(
                f"{reason(error)}; it is not replaced: give --resume to go on from an earlier one, or another "
                "folder"
            ) from None


def require_writable(folder: str | Path) -> None:
    """Refuse a folder that checkpoints cannot be written into, or that cannot be made; nothing is left behind.

    A checkpoint starts as a new folder within `folder`, so one is made and removed again: in `folder`, or where
    that does not exist in the nearest folder above it. Permission bits alone do not say it: the disk may be
    mounted read-only.
    """
    nearest = Path(folder).absolute()
    while not os.path.lexists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".bapipe-", dir=nearest))
    except OSError as error:
        raise BaPipeError(
            f"checkpoints cannot be written into {folder}: {disk_problem(error, nearest)}; make it writable, or "
            "give another folder"
        ) from None
