"""The manifest of a checkpoint: its step, its tensors, and size and SHA-256 of every file. Imports no torch.

The manifest is written last. It holds a SHA-256 of its own content, so that an edit or a flipped bit is noticed,
and one of every other file, so that a file of another step or another run is.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bapipe.errors import BaPipeError, FileFormatError
from bapipe.io.decode import decode
from bapipe.io.files import dump_json, plain_values
from bapipe.models.layers import ModelRef
from bapipe.torch.checkpoint.checkpoint_files import disk_words, file_size, read_small_file

__all__ = [
    "CHECKPOINT_SCHEMA",
    "MANIFEST",
    "METADATA",
    "SMALL_STATE",
    "TRAINING",
    "CheckpointError",
    "Manifest",
    "SavedFile",
    "UnknownSchemaError",
    "UnreadableCheckpointError",
    "dump_manifest",
    "fingerprint_of",
    "read_manifest",
    "step_of",
]

CHECKPOINT_SCHEMA = "bapipe.checkpoint/2"
_UNVERIFIED_SCHEMA = "bapipe.checkpoint/1"
"""had sizes and no checksums"""
MANIFEST = "checkpoint.json"
METADATA = ".metadata"
SMALL_STATE = "state.pt"
TRAINING = "training.json"
_MANIFEST_LIMIT = 64 * 2**20
_STEP = re.compile(r"step-(\d{8,18})")
_PLAIN = re.compile(r"[A-Za-z0-9_.-]*[A-Za-z0-9_-]")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class CheckpointError(BaPipeError):
    """A checkpoint that could not be written, where the last complete one is as it was; or that cannot be read."""


class UnreadableCheckpointError(CheckpointError, FileFormatError):
    """A checkpoint that is damaged or incomplete; none of its values is used."""


class UnknownSchemaError(UnreadableCheckpointError):
    """A checkpoint of a schema that this version does not know: it may be whole, and is never replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """What a file of a checkpoint must be."""

    size: int
    """bytes"""
    sha256: str | None
    """in hexadecimal digits; None: the checkpoint was written before there were checksums"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a complete checkpoint holds; versioned as checkpoint.json."""

    schema: str = CHECKPOINT_SCHEMA
    step: int
    """global batches trained"""
    model: ModelRef
    saved_under: str
    """the plan's kind, schedule and stages, for people; any other plan can read it"""
    global_batch: int
    microbatch_size: int
    """with another one dropout draws, and batch-norm sees, other micro-batches"""
    saved: tuple[str, ...]
    """what there is beside the model: optimizer, scheduler, scaler, data"""
    aliases: dict[str, str] = field(default_factory=dict)
    """another name of a tensor in the model's state_dict -> the one that it is saved under"""
    tensors: str | None = None
    """SHA-256 of name, shape and dtype of the model's parameters and buffers"""
    files: dict[str, SavedFile]
    """name -> size and SHA-256, of every file but the manifest"""
    torch: str
    """version"""
    sha256: str | None = None
    """of all other entries"""

    @property
    def verified(self) -> bool:
        """Whether there are checksums to verify by."""
        return self.sha256 is not None


def fingerprint_of(tensors: Iterable[tuple[str, Sequence[int], str]]) -> str:
    """SHA-256 of a model's tensors: name, shape and dtype of each, in any order."""
    rows = sorted([name, [int(size) for size in shape], dtype] for name, shape, dtype in tensors)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _content_digest(values: dict[str, Any]) -> str:
    """Of all entries but `sha256`; every schema from 2 on has it so."""
    rest = {name: value for name, value in values.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, allow_nan=False).encode()).hexdigest()


def dump_manifest(manifest: Manifest) -> str:
    """The manifest's text, with the SHA-256 of its content."""
    return dump_json(replace(manifest, sha256=_content_digest(plain_values(manifest))))


def read_manifest(checkpoint: str | Path, *, files: bool = True) -> Manifest:
    """The manifest of one checkpoint, all of whose files are there in the right size; `files` are not looked at
    if that is False.

    UnknownSchemaError if it is of another version of BaPipe, else UnreadableCheckpointError if it cannot be read.
    """
    path = Path(checkpoint)
    try:
        manifest = decode(Manifest, _values(path), where=str(path / MANIFEST))
    except UnreadableCheckpointError:
        raise
    except FileFormatError as error:
        raise UnreadableCheckpointError(f"{error}; the checkpoint is damaged, use another") from None
    _check(path, manifest)
    for name, file in manifest.files.items() if files else ():
        problem = _size_problem(path / name, file)
        if problem is not None:
            raise UnreadableCheckpointError(f"{path} is no complete checkpoint: {name} {problem}; use another one")
    return manifest


def _values(path: Path) -> dict[str, Any]:
    """The manifest's entries, which are as they were written; those of an old one as they would be now."""
    try:
        text = read_small_file(path / MANIFEST, _MANIFEST_LIMIT).decode()
        data = json.loads(text, parse_constant=_refuse)
    except OSError as error:
        raise UnreadableCheckpointError(
            f"{path} is no complete checkpoint: {MANIFEST} cannot be read: {disk_words(error)}; use another one"
        ) from None
    except (ValueError, RecursionError):
        raise UnreadableCheckpointError(f"{path} is damaged: {MANIFEST} is no JSON; use another one") from None
    if not isinstance(data, dict) or not isinstance(data.get("schema"), str):
        raise UnreadableCheckpointError(f"{path} is damaged: {MANIFEST} has no schema; use another one")
    schema = data["schema"]
    written = data.get("sha256")
    # Before anything else: what was edited must not be taken for another version's.
    if (written is not None or schema == CHECKPOINT_SCHEMA) and written != _digest_or_none(data):
        raise UnreadableCheckpointError(
            f"{path} is damaged: the content of {MANIFEST} does not match its checksum; use another one"
        )
    if schema == _UNVERIFIED_SCHEMA:
        return _upgraded(path, data)
    if schema != CHECKPOINT_SCHEMA:
        raise UnknownSchemaError(
            f"{path} has schema {ascii(schema)[:60]}, this version of BaPipe reads {CHECKPOINT_SCHEMA}; use the "
            "version that wrote it"
        )
    return data


def _digest_or_none(data: dict[str, Any]) -> str | None:
    try:
        return _content_digest(data)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _upgraded(path: Path, data: dict[str, Any]) -> dict[str, Any]:
    files = data.get("files")
    # It was written before there was any of these.
    if not isinstance(files, dict) or "tensors" in data or "sha256" in data or TRAINING in files:
        raise UnreadableCheckpointError(f"{path} is damaged: {MANIFEST} is not as it was written; use another one")
    return {**data, "files": {name: {"size": size, "sha256": None} for name, size in files.items()}}


def _check(path: Path, manifest: Manifest) -> None:
    """That step, names and sizes can be those of this folder."""
    named = step_of(path)
    if manifest.step < 0 or (named is not None and named != manifest.step):
        raise UnreadableCheckpointError(
            f"{path} is a checkpoint of step {str(manifest.step)[:20]}, by its name of another; rename it, or use "
            "another one"
        )
    for name in (METADATA, SMALL_STATE):
        if name not in manifest.files:
            raise UnreadableCheckpointError(f"{path} is damaged: {MANIFEST} does not list {name}; use another one")
    for name, file in manifest.files.items():
        checksum = file.sha256 is None if not manifest.verified else _DIGEST.fullmatch(file.sha256 or "")
        if not _PLAIN.fullmatch(name) or file.size < 0 or not checksum:
            raise UnreadableCheckpointError(
                f"{path} is damaged: {MANIFEST} lists {ascii(name)[:60]} as no file can be; use another one"
            )


def _size_problem(path: Path, file: SavedFile) -> str | None:
    try:
        found = file_size(path)
    except OSError as error:
        return f"cannot be read: {disk_words(error)}"
    return None if found == file.size else f"has {found} bytes instead of {file.size}"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name; None: it is no such name."""
    match = _STEP.fullmatch(path.name)
    return None if match is None else int(match[1])
