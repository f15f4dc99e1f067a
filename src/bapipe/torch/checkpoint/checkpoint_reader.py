"""Reads a checkpoint, and uses nothing of a file before all of it was found to be what was written."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from bapipe.errors import BaPipeError, FileFormatError
from bapipe.records.training_record import TrainingRecord, parse_training
from bapipe.torch.checkpoint.checkpoint_files import HashedFile, disk_words
from bapipe.torch.checkpoint.checkpoint_manifest import (
    METADATA,
    SMALL_STATE,
    TRAINING,
    UnreadableCheckpointError,
    fingerprint_of,
    read_manifest,
)
from bapipe.torch.checkpoint.checkpoint_metadata import parse_metadata
from bapipe.torch.checkpoint.tensor_pieces import (
    Pieces,
    boxes_to_read,
    check_pieces,
    model_name,
    place_box,
    saved_tensor,
)

__all__ = ["CheckpointReader", "described_tensors"]

T = TypeVar("T")
_SMALL = ("scheduler", "scaler", "data", "groups", "random")


class CheckpointReader:
    """One checkpoint, open. Each file is read and hashed once, when it is first needed.

    Whatever is wrong with it is an UnreadableCheckpointError; that it is of another model a BaPipeError.
    """

    def __init__(self, checkpoint: str | Path) -> None:
        self.path = Path(checkpoint)
        self.manifest = read_manifest(self.path)
        self._files: dict[str, HashedFile] = {}
        self._small: dict[str, Any] | None = None
        self.casts = False
        """whether floating tensors may be read in another dtype than they were saved in"""
        self.metadata = self._parsed_metadata()
        if not self.manifest.verified:
            self.small()  # it says whether there were checksums once

    @property
    def unverified(self) -> str | None:
        """A line that says so, if there is nothing to verify the checkpoint by."""
        if self.manifest.verified:
            return None
        return (
            f"{self.path} was written by an earlier version and has no checksums: whether it is damaged cannot be "
            "verified; the next save has them"
        )

    def training(self) -> TrainingRecord | None:
        """What the training was; None: it was saved by a version that did not record it.

        BaPipeError if a newer version wrote it: the record is as it was written, so the checkpoint is not damaged.
        """
        if TRAINING not in self.manifest.files:
            return None
        where = str(self.path / TRAINING)
        text = self._guarded(TRAINING, self._bytes(TRAINING).decode)
        try:
            return parse_training(text, where=where)
        except FileFormatError as error:
            if not self.manifest.verified:
                raise self._damaged(TRAINING, "cannot be read") from error
            raise BaPipeError(f"{error}; use the version that wrote {self.path}") from None

    def check(self, pieces: Pieces) -> None:
        """BaPipeError unless it has all pieces, in the shape of the whole; dtypes are left to `verify`."""
        check_pieces(self.path, self.metadata, pieces, cast=True)

    def small(self) -> dict[str, Any]:
        """What is beside the tensors."""
        if self._small is None:
            data = self._bytes(SMALL_STATE)
            found = self._guarded(
                SMALL_STATE, lambda: torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            )
            if not isinstance(found, dict) or any(name not in found for name in _SMALL):
                raise self._damaged(SMALL_STATE, "lacks entries")
            if self.manifest.verified != ("step" in found) or found.get("step", self.manifest.step) != (
                self.manifest.step
            ):
                raise self._damaged(SMALL_STATE, "is of another step, or the manifest has lost its checksums")
            self._small = found
        return self._small

    def verify(self, pieces: Pieces) -> None:
        """That all files that these pieces are in are as they were written."""
        check_pieces(self.path, self.metadata, pieces, cast=self.casts)
        for item in boxes_to_read(self.metadata, pieces):
            self._file(self._place(item).relative_path)

    def verify_all(self) -> None:
        """Every file."""
        for name in self.manifest.files:
            self._file(name)
        self.small()

    def read(self, pieces: Pieces) -> None:
        """Fill the pieces; the checkpoint must have them all, in the same dtype and shape of the whole.

        Where it `casts`, floating values are converted.
        Every process reads for itself, and only what it needs.
        """
        self.verify(pieces)
        for item in boxes_to_read(self.metadata, pieces):
            place_box(pieces, item, self._box(item))

    def _box(self, item: ReadItem) -> Tensor:
        key, place = item.storage_index.fqn, self._place(item)
        saved = saved_tensor(self.metadata, key)
        assert saved is not None
        name = place.relative_path
        data = self._bytes(name, place.offset, place.length)
        found = self._guarded(name, lambda: torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
        boxes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in saved.chunks}
        wanted = boxes[tuple(item.storage_index.offset or ())]
        if (
            not isinstance(found, Tensor)
            or found.layout != torch.strided
            or found.dtype != saved.properties.dtype
            or tuple(found.shape) != wanted
        ):
            raise self._damaged(name, f"has no such tensor as {METADATA} says")
        return found.detach()

    def _place(self, item: ReadItem) -> Any:
        return self.metadata.storage_data[item.storage_index]

    def _parsed_metadata(self) -> Metadata:
        manifest, data = self.manifest, self._bytes(METADATA)
        try:
            found = parse_metadata(data, manifest.files, verified=manifest.verified)
        except ValueError as error:
            raise self._damaged(METADATA, str(error)) from None
        tensors = list(described_tensors(found))
        if manifest.tensors is not None and manifest.tensors != fingerprint_of(tensors):
            raise self._damaged(METADATA, "is of another model")
        names = {name for name, _, _ in tensors}
        if manifest.verified != (manifest.tensors is not None) or not names.issuperset(manifest.aliases.values()):
            raise self._damaged(METADATA, "does not have the tensors that the manifest names")
        return found

    def _bytes(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        file, length = self._file(name), self.manifest.files[name].size if length is None else length
        return self._whole(name, lambda: file.read(offset, length))

    def _file(self, name: str) -> HashedFile:
        """Open, and verified."""
        found = self._files.get(name)
        if found is None:
            path, wanted = self.path / name, self.manifest.files[name]
            found = self._whole(name, lambda: HashedFile(path, size=wanted.size, sha256=wanted.sha256))
            self._files[name] = found
        return found

    def _whole(self, name: str, read: Callable[[], T]) -> T:
        """What is read of a file; it must be the one that was written."""
        try:
            return read()
        except OSError as error:
            raise self._damaged(name, f"cannot be read: {disk_words(error)}") from None
        except ValueError as error:
            raise self._damaged(name, str(error)) from None

    def _guarded(self, name: str, load: Callable[[], T]) -> T:
        try:
            return load()
        except Exception as error:
            raise self._damaged(name, f"cannot be read: {type(error).__name__}") from error

    def _damaged(self, name: str, what: str) -> UnreadableCheckpointError:
        return UnreadableCheckpointError(f"{self.path} is damaged: {name} {what}; use another one")


def described_tensors(metadata: Metadata) -> Iterable[tuple[str, tuple[int, ...], str]]:
    """Name, shape and dtype of the saved model's parameters and buffers."""
    for key in metadata.state_dict_metadata:
        name, about = model_name(key), saved_tensor(metadata, key)
        if name is not None and about is not None:
            yield name, tuple(about.size), str(about.properties.dtype)
