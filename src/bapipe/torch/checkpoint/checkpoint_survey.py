"""What is in a folder of checkpoints, and whether it is as it was written. Imports no torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from bapipe.errors import BaPipeError
from bapipe.records.training_record import read_training
from bapipe.torch.checkpoint.checkpoint_files import HashedFile, disk_words
from bapipe.torch.checkpoint.checkpoint_folder import UNFINISHED, checkpoints_of, is_checkpoint, reason
from bapipe.torch.checkpoint.checkpoint_manifest import (
    MANIFEST,
    TRAINING,
    Manifest,
    UnknownSchemaError,
    UnreadableCheckpointError,
    read_manifest,
    step_of,
)

__all__ = ["CheckpointSummary", "Verified", "find_checkpoints", "summarise", "unfinished_in", "verify_files"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSummary:
    """One checkpoint, by its manifest and the sizes of its files; their content is not looked at."""

    path: Path
    step: int | None
    """None: neither its name nor its manifest tells"""
    written: datetime | None
    """when it became complete, in UTC; None: it did not"""
    size: int
    """bytes of its files, as far as they can be seen"""
    state: str
    """complete, incomplete, or unknown, where another version has written it"""
    problem: str | None
    """why it is not complete"""
    model: str | None
    optimizer: str | None
    """class; None: not recorded, or saved without one"""
    precision: str | None
    """None: not recorded"""
    saved_under: str | None
    """kind, schedule and stages of the plan"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """Whether the files of a checkpoint are those that were written."""

    path: Path
    files: int
    size: int
    """bytes that were read"""
    damaged: dict[str, str]
    """file -> a line that says what is wrong with it; empty: nothing"""
    hashed: bool
    """whether it has checksums; else sizes alone were compared"""


def find_checkpoints(folder: str | Path, *, step: int | None = None) -> list[Path]:
    """The checkpoints of a folder, the latest first, readable or not; or the one that a path is itself.

    BaPipeError if there is none, or none of that step.
    """
    path = Path(folder)
    is_one = is_checkpoint(path) or (step_of(path) is not None and path.is_dir())
    found = [path] if is_one else checkpoints_of(path)
    if not found:
        raise BaPipeError(f"{folder} holds no checkpoint; give a folder that bapipe run --checkpoint wrote")
    if step is None:
        return found
    chosen = [item for item in found if step_of(item) == step]
    if not chosen:
        known = ", ".join(str(step_of(item)) for item in reversed(found) if step_of(item) is not None)
        raise BaPipeError(f"{folder} has no checkpoint of step {step}; it has those of {known or 'none'}")
    return chosen


def unfinished_in(folder: str | Path) -> list[Path]:
    """What is being written, or was left by runs that were killed: never read, removed by the next save."""
    try:
        return sorted(path for path in Path(folder).iterdir() if path.name.startswith(UNFINISHED))
    except OSError:
        return []


def summarise(checkpoint: Path) -> CheckpointSummary:
    """What can be said of a checkpoint, whatever state it is in."""
    manifest, state, problem = None, "complete", None
    try:
        manifest = read_manifest(checkpoint)
    except UnknownSchemaError as error:
        state, problem = "unknown", reason(error)
    except UnreadableCheckpointError as error:
        state, problem = "incomplete", reason(error)
    optimizer, precision = None, None
    if manifest is not None and TRAINING in manifest.files:
        try:
            training = read_training(checkpoint / TRAINING)
        except BaPipeError as error:
            state, problem = "incomplete", str(error)
        else:
            precision = training.precision
            optimizer = None if training.optimizer is None else training.optimizer.name
    return CheckpointSummary(
        path=checkpoint,
        step=step_of(checkpoint) if manifest is None else manifest.step,
        written=_written(checkpoint),
        size=sum(_sizes(checkpoint)),
        state=state,
        problem=problem,
        model=None if manifest is None else manifest.model.name,
        optimizer=optimizer,
        precision=precision,
        saved_under=None if manifest is None else manifest.saved_under,
    )


def _written(checkpoint: Path) -> datetime | None:
    try:
        return datetime.fromtimestamp((checkpoint / MANIFEST).stat().st_mtime, tz=UTC)
    except OSError:
        return None


def _sizes(checkpoint: Path) -> Iterator[int]:
    try:
        files = list(checkpoint.iterdir())
    except OSError:
        return
    for file in files:
        if file.is_file():
            yield file.stat().st_size


def verify_files(checkpoint: Path) -> Verified:
    """Read every file of a checkpoint and compare it with its checksum; all that are damaged are told.

    Files are read once, one after another. Nothing in them is used.
    """
    try:
        manifest = read_manifest(checkpoint, files=False)
    except UnreadableCheckpointError as error:
        return Verified(path=checkpoint, files=1, size=0, damaged={MANIFEST: reason(error)}, hashed=True)
    damaged = {
        name: f"{checkpoint} is damaged: {name} {problem}"
        for name in manifest.files
        if (problem := _problem(checkpoint, manifest, name)) is not None
    }
    if not damaged and not manifest.verified:
        damaged = _without_checksums(checkpoint)
    return Verified(
        path=checkpoint,
        files=len(manifest.files) + 1,
        size=sum(file.size for file in manifest.files.values()),
        damaged=damaged,
        hashed=manifest.verified,
    )


def _without_checksums(checkpoint: Path) -> dict[str, str]:
    """What can be found where there is nothing to compare with: files that cannot be parsed, where torch can."""
    if importlib.util.find_spec("torch") is None:
        return {}
    from bapipe.torch.checkpoint.checkpoint_reader import CheckpointReader

    try:
        CheckpointReader(checkpoint).verify_all()
    except UnreadableCheckpointError as error:
        return {MANIFEST: reason(error)}
    return {}


def _problem(checkpoint: Path, manifest: Manifest, name: str) -> str | None:
    wanted = manifest.files[name]
    try:
        HashedFile(checkpoint / name, size=wanted.size, sha256=wanted.sha256)
    except OSError as error:
        return f"cannot be read: {disk_words(error)}"
    except ValueError as error:
        return str(error)
    return None
