"""Folders of checkpoints: how one becomes complete all at once, and which is the last. Imports no torch.

run/.lock                   held by the run that writes into the folder
run/.partial-00000006/      being written, or left by a run that was killed: never read, removed by the next save
run/step-00000003/          complete: it got this name after all its bytes were on disk
    checkpoint.json         the manifest, written last: step, names, size and SHA-256 of every other file
    .metadata, __0_0.distcp … torch.distributed.checkpoint's: tensors under the model's own names
    state.pt                what is small: parameter groups, scheduler, data position, random generators
    training.json           what the training is: the model's structure, optimizer, precision, settings
run/damaged-step-00000002/  could not be read when its step was saved again: set aside, never removed
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from bapipe.errors import BaPipeError, first_line
from bapipe.io.files import sync
from bapipe.torch.checkpoint.checkpoint_files import disk_words
from bapipe.torch.checkpoint.checkpoint_manifest import (
    CHECKPOINT_SCHEMA,
    MANIFEST,
    CheckpointError,
    Manifest,
    UnknownSchemaError,
    UnreadableCheckpointError,
    dump_manifest,
    read_manifest,
    step_of,
)
from bapipe.units import format_bytes

__all__ = [
    "UNFINISHED",
    "begin_checkpoint",
    "candidates",
    "checkpoints_of",
    "commit_checkpoint",
    "discard",
    "disk_problem",
    "find_checkpoint",
    "is_checkpoint",
    "keep_last",
    "latest",
    "reason",
    "refuse_unread",
    "set_aside",
]

UNFINISHED = (".partial-", ".removed-")
"""what names of folders begin with that are no checkpoints yet, or no longer"""


def checkpoints_of(folder: str | Path) -> list[Path]:
    """All that have a checkpoint's name, the latest first, whether they can be read or not."""
    try:
        found = [(step, path) for path in Path(folder).iterdir() if (step := step_of(path)) is not None]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {disk_words(error)}; give another folder") from None
    return [path for _, path in sorted(found, reverse=True)]


def is_checkpoint(path: str | Path) -> bool:
    """Whether a path is a checkpoint itself, and no folder of them."""
    return os.path.lexists(Path(path) / MANIFEST)


def reason(error: BaseException) -> str:
    """What is wrong with a checkpoint, without what to do."""
    return str(error).rpartition("; ")[0] or str(error)


def latest(folder: str | Path, *, besides: Collection[Path] = ()) -> Path | None:
    """The last complete checkpoint of a folder, or None; by its manifest and the sizes of its files."""
    for path in checkpoints_of(folder):
        if path in besides:
            continue
        try:
            read_manifest(path)
        except UnreadableCheckpointError:
            continue
        return path
    return None


def candidates(folder: str | Path, say: Callable[[str], None]) -> Iterator[Path]:
    """The complete checkpoints of a folder, the latest first, to take the first one whose files are as written.

    Those that are damaged are passed over, and `say` is called with a line for each. One of an unknown schema is
    not: UnknownSchemaError.
    """
    for path in checkpoints_of(folder):
        try:
            read_manifest(path)
        except UnknownSchemaError:
            raise
        except UnreadableCheckpointError as error:
            say(f"skipped a checkpoint: {reason(error)}")
        else:
            yield path


def find_checkpoint(path: str | Path) -> Path:
    """A checkpoint by its own path, or the last one of a folder of them; BaPipeError if there is none.

    Nothing is passed over: if the last one cannot be read, that is the error.
    """
    if is_checkpoint(path):
        read_manifest(path)
        return Path(path)
    found = checkpoints_of(path)
    if not found:
        refuse_unread(path, required=True)
    read_manifest(found[0])
    return found[0]


def refuse_unread(folder: str | Path, *, required: bool) -> None:
    """Where no checkpoint of a folder could be read: CheckpointError if there are any, BaPipeError if required."""
    count = len(checkpoints_of(folder))
    if count:
        raise CheckpointError(
            f"none of the {count} checkpoints in {folder} can be read; give another folder to train from the start"
        )
    if required:
        raise BaPipeError(
            f"{folder} holds no complete checkpoint; give a folder that bapipe run --checkpoint wrote"
        )


def begin_checkpoint(folder: str | Path, step: int, *, besides: Collection[Path] = ()) -> Path:
    """An empty folder to write the checkpoint of a step into; what killed runs left is removed.

    Refused where the last complete checkpoint is not an earlier one: it would be of another training, and hide
    this one; and where one that is not earlier is of an unknown schema. `besides` are known to be damaged. The
    caller holds the folder's lock.
    """
    target = Path(folder)
    _make_folder(target)
    for path in target.iterdir():
        if path.name.startswith(UNFINISHED):
            discard(path)
    for path in checkpoints_of(target):
        if path in besides or (step_of(path) or 0) < step:
            continue
        try:
            read_manifest(path)
        except UnknownSchemaError as error:
            raise BaPipeError(
                f"{reason(error)}, so this training cannot save step {step} beside it; give another folder"
            ) from None
        except UnreadableCheckpointError:
            continue
        raise BaPipeError(
            f"{path} is complete, so this training cannot save step {step} beside it; load that one first, or "
            "give another folder"
        )
    partial = target / f".partial-{step:08d}"
    partial.mkdir()
    return partial


def _make_folder(path: Path) -> None:
    """With its parents; their names are on disk, too."""
    if path.is_dir():
        return
    if path.parent != path:
        _make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync(path.parent)


def set_aside(folder: str | Path, step: int, *, besides: Collection[Path] = ()) -> Path | None:
    """Give a damaged checkpoint of a step another name, so that the step can be saved; the name, or None.

    CheckpointError if it is not damaged: it came since `begin_checkpoint`, by another run.
    """
    taken = Path(folder) / f"step-{step:08d}"
    if not os.path.lexists(taken):
        return None
    if taken not in besides and not _is_damaged(taken):
        raise CheckpointError(f"{taken} was written by another run meanwhile; give each run its own folder")
    number, aside = 1, taken.with_name(f"damaged-{taken.name}")
    while os.path.lexists(aside):
        number += 1
        aside = taken.with_name(f"damaged-{taken.name}-{number}")
    taken.rename(aside)
    return aside


def _is_damaged(checkpoint: Path) -> bool:
    try:
        read_manifest(checkpoint)
    except UnreadableCheckpointError as error:
        return not isinstance(error, UnknownSchemaError)
    return False


def commit_checkpoint(partial: Path, manifest: Manifest) -> Path:
    """Make a checkpoint whose files are on disk complete, in one step. Returns its final path."""
    final = partial.with_name(f"step-{manifest.step:08d}")
    with (partial / MANIFEST).open("x", encoding="utf-8") as stream:
        stream.write(dump_manifest(manifest))
        stream.flush()
        os.fsync(stream.fileno())
    sync(partial)
    if os.path.lexists(final):
        raise CheckpointError(f"{final} is there already, and is not replaced; give another folder")
    partial.rename(final)
    sync(final.parent)
    return final


def keep_last(folder: str | Path, count: int, *, besides: Collection[Path] = ()) -> None:
    """Remove all complete checkpoints of this schema but the last ones. What cannot be removed stays.

    So does what cannot be read, or is of another schema, and does not count; nor do `besides`.
    """
    kept = 0
    for path in checkpoints_of(folder):
        if path in besides:
            continue
        try:
            if read_manifest(path).schema != CHECKPOINT_SCHEMA:
                continue
            kept += 1
            if kept > count:
                _remove(path)
        except UnreadableCheckpointError:
            continue
        except OSError:
            return


def _remove(path: Path) -> None:
    """A checkpoint loses its name first: half of one is never seen."""
    doomed = path.with_name(f".removed-{path.name}")
    discard(doomed)
    path.rename(doomed)
    discard(doomed)


def discard(path: Path) -> None:
    """Remove a folder as far as that is possible."""
    shutil.rmtree(path, ignore_errors=True)


def disk_problem(error: BaseException, folder: str | Path) -> str:
    """Why a write failed, in words."""
    if isinstance(error, OSError) and error.errno is not None:
        free = f" ({_free(folder)})" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        return f"{os.strerror(error.errno)}{free}"
    return first_line(error)


def _free(folder: str | Path) -> str:
    try:
        return f"{format_bytes(shutil.disk_usage(folder).free)} free"
    except OSError as error:
        return str(error)
