"""Folders of checkpoints: how one becomes complete all at once, and which is the last. Imports no torch.

run/.partial-00000006/      being written, or left by a run that was killed: never read, removed by the next save
run/step-00000003/          complete: it got this name after all its bytes were on disk
    checkpoint.json         the manifest, written last: step, names, and the size of every other file
    .metadata, __0_0.distcp … torch.distributed.checkpoint's: tensors under the model's own names
    state.pt                what is small: parameter groups, scheduler, data position, random generators
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from bapipe.errors import BaPipeError, FileFormatError
from bapipe.io.files import dump_json, read_versioned
from bapipe.models.layers import ModelRef
from bapipe.units import format_bytes

__all__ = [
    "CHECKPOINT_SCHEMA",
    "MANIFEST",
    "SMALL_STATE",
    "CheckpointError",
    "Manifest",
    "begin_checkpoint",
    "commit_checkpoint",
    "discard",
    "disk_problem",
    "find_checkpoint",
    "keep_last",
    "latest",
    "read_manifest",
]

CHECKPOINT_SCHEMA = "bapipe.checkpoint/1"
MANIFEST = "checkpoint.json"
SMALL_STATE = "state.pt"
_STEP = re.compile(r"step-(\d{8,})")
_UNFINISHED = (".partial-", ".removed-")


class CheckpointError(BaPipeError):
    """A checkpoint that could not be written; the last complete one is as it was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a complete checkpoint holds; versioned as checkpoint.json."""

    schema: str = CHECKPOINT_SCHEMA
    step: int
    """mini-batches trained"""
    model: ModelRef
    saved_under: str
    """the plan's kind, schedule and stages, for people; any other plan can read it"""
    minibatch: int
    microbatch_size: int
    """with another one dropout draws, and batch-norm sees, other micro-batches"""
    saved: tuple[str, ...]
    """what there is beside the model: optimizer, scheduler, scaler, data"""
    aliases: dict[str, str] = field(default_factory=dict)
    """another name of a tensor in the model's state_dict -> the one that it is saved under"""
    files: dict[str, int]
    """name -> bytes, of every file but the manifest"""
    torch: str
    """version"""


def read_manifest(checkpoint: str | Path) -> Manifest:
    """The manifest of one checkpoint; FileFormatError if it has none, or not all of its files."""
    path = Path(checkpoint)
    manifest = read_versioned(Manifest, path / MANIFEST, schema=CHECKPOINT_SCHEMA)
    for name, size in manifest.files.items():
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise FileFormatError(f"{path} is no complete checkpoint: {name} {what}; use another one")
    return manifest


def _by_step(folder: Path) -> list[tuple[int, Path]]:
    """All that have a checkpoint's name, the latest first."""
    try:
        entries = [(match, path) for path in folder.iterdir() if (match := _STEP.fullmatch(path.name))]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(((int(match[1]), path) for match, path in entries), reverse=True)


def latest(folder: str | Path) -> Path | None:
    """The last complete checkpoint of a folder, or None."""
    for _, path in _by_step(Path(folder)):
        try:
            read_manifest(path)
        except FileFormatError:
            continue
        return path
    return None


def find_checkpoint(path: str | Path) -> Path:
    """A checkpoint by its own path, or the last one of a folder of them; BaPipeError if there is none."""
    if (Path(path) / MANIFEST).is_file():
        read_manifest(path)
        return Path(path)
    found = latest(path)
    if found is None:
        raise BaPipeError(f"{path} holds no complete checkpoint; give a folder that bapipe run --checkpoint wrote")
    return found


def begin_checkpoint(folder: str | Path, step: int) -> Path:
    """An empty folder to write the checkpoint of a step into; what killed runs left is removed.

    Refused where the last complete checkpoint is not an earlier one: it would be of another training, and hide
    this one. One run at a time may write into a folder.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for path in target.iterdir():
        if path.name.startswith(_UNFINISHED):
            discard(path)
    last = latest(target)
    if last is not None and read_manifest(last).step >= step:
        raise BaPipeError(
            f"{last} is complete, so this training cannot save step {step} beside it; load that one first, or "
            "give another folder"
        )
    partial = target / f".partial-{step:08d}"
    partial.mkdir()
    return partial


def commit_checkpoint(partial: Path, manifest: Manifest) -> Path:
    """Make a checkpoint whose files are on disk complete, in one step. Returns its final path."""
    final = partial.with_name(f"step-{manifest.step:08d}")
    with (partial / MANIFEST).open("x", encoding="utf-8") as stream:
        stream.write(dump_json(manifest))
        stream.flush()
        os.fsync(stream.fileno())
    _sync_folder(partial)
    if final.exists():  # `begin_checkpoint` saw that it is damaged
        _remove(final)
    partial.rename(final)
    _sync_folder(final.parent)
    return final


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def keep_last(folder: str | Path, count: int) -> None:
    """Remove all complete or damaged checkpoints but the last ones. What cannot be removed stays."""
    for _, path in _by_step(Path(folder))[count:]:
        try:
            _remove(path)
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
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _free(folder: str | Path) -> str:
    try:
        return f"{format_bytes(shutil.disk_usage(folder).free)} free"
    except OSError as error:
        return str(error)
