"""Tensors, whole or cut, in and out of a torch.distributed.checkpoint, however they were and will be cut."""

from __future__ import annotations

import contextlib
import io
import math
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from bapipe.errors import BaPipeError
from bapipe.torch.capturing.stage_module import Slice
from bapipe.torch.checkpoint.checkpoint_files import HashingStream
from bapipe.torch.checkpoint.checkpoint_manifest import SavedFile

__all__ = [
    "Piece",
    "PieceFiles",
    "PieceWriter",
    "Pieces",
    "boxes_to_read",
    "check_pieces",
    "model_key",
    "model_name",
    "optimizer_key",
    "optimizer_name",
    "piece_of",
    "place_box",
    "range_pieces",
    "saved_tensor",
]

_MODEL, _OPTIMIZER = "model/", "optimizer/"


def model_key(name: str) -> str:
    """Of a parameter or buffer in a checkpoint."""
    return f"{_MODEL}{name}"


def model_name(key: str) -> str | None:
    """The parameter or buffer that a key is of; None: it is none's."""
    return key.removeprefix(_MODEL) if key.startswith(_MODEL) else None


def optimizer_key(name: str, entry: str) -> str:
    """Of an entry of the optimizer's state of a parameter."""
    return f"{_OPTIMIZER}{name}/{entry}"


def optimizer_name(key: str) -> tuple[str, str] | None:
    """The parameter and the entry that a key is of; None: it is not the optimizer's."""
    if not key.startswith(_OPTIMIZER):
        return None
    name, _, entry = key.removeprefix(_OPTIMIZER).rpartition("/")
    return name, entry


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """All of a tensor, or a box of it."""

    tensor: Tensor
    start: tuple[int, ...]
    """where in the whole it begins"""
    whole: tuple[int, ...]
    """shape of the whole"""

    @property
    def box(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(self.start), sizes=self.tensor.size())


Pieces = Mapping[str, Sequence[Piece]]
"""key -> the pieces of it that are here"""


def piece_of(tensor: Tensor, part: Slice | None = None) -> Piece:
    """A tensor as the part of the whole that it is; None: all of it."""
    start, whole = [0] * tensor.ndim, list(tensor.shape)
    if part is not None:
        start[part.dim], whole[part.dim] = part.start, part.of
    return Piece(tensor=tensor.detach(), start=tuple(start), whole=tuple(whole))


def range_pieces(flat: Tensor, begin: int, shape: Sequence[int], part: Slice | None = None) -> list[Piece]:
    """Elements of a tensor of this shape, row by row from `begin` on, as boxes of it, of which there are few.

    `flat` has them in one dimension; the boxes are views of it. `part` says which part of the whole the tensor is.
    """
    found = []
    for at, offsets, sizes in _boxes(begin, begin + flat.numel(), tuple(shape)):
        box = flat[at - begin : at - begin + math.prod(sizes)].view(sizes)
        start, whole = list(offsets), list(shape)
        if part is not None:
            start[part.dim] += part.start
            whole[part.dim] = part.of
        found.append(Piece(tensor=box.detach(), start=tuple(start), whole=tuple(whole)))
    return found


def _boxes(begin: int, end: int, shape: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """First element, offsets and sizes of boxes that are the elements [begin, end): the rest of a row, whole rows,
    and the begin of one."""
    if begin >= end:
        return
    if not shape:
        yield 0, (), ()
        return
    row = math.prod(shape[1:])
    first, last = begin // row, (end - 1) // row
    whole = range(first + (begin % row > 0), last + (end % row == 0))
    if begin % row or (first == last and not whole):
        for at, offsets, sizes in _boxes(begin - first * row, min(end - first * row, row), shape[1:]):
            yield first * row + at, (first, *offsets), (1, *sizes)
    if whole:
        yield whole.start * row, (whole.start, *[0] * (len(shape) - 1)), (len(whole), *shape[1:])
    if last > first and end % row:
        for at, offsets, sizes in _boxes(0, end - last * row, shape[1:]):
            yield last * row + at, (last, *offsets), (1, *sizes)


def _find(pieces: Pieces, index: MetadataIndex) -> Tensor:
    assert index.offset is not None
    return next(item.tensor for item in pieces[index.fqn] if item.start == tuple(index.offset))


class PieceWriter(DefaultSavePlanner):
    """Writes pieces. What several ranks have one of them writes; together they must have all of a tensor."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        items = []
        for key, pieces in self.state_dict.items():
            for piece in pieces:
                data = TensorWriteData(
                    chunk=piece.box,
                    properties=TensorProperties.create_from_tensor(piece.tensor),
                    size=torch.Size(piece.whole),
                )
                index = MetadataIndex(key, piece.box.offsets)
                items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        return _find(self.state_dict, index)


class _Disk(FileSystem):
    """New files, hashed as they are written. Errors are the system's: torch.save has another for a full disk."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[str, SavedFile] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "wb"
        try:
            with HashingStream(path, self._note) as stream:
                yield stream
        except RuntimeError as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            if cause is None:
                raise
            raise OSError(*cause.args) from error

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[os.path.basename(new_path)] = self.written.pop(os.path.basename(path))

    def _note(self, name: str, size: int, sha256: str) -> None:
        self.written[name] = SavedFile(size=size, sha256=sha256)


class PieceFiles(FileSystemWriter):
    """Writes one file per rank into a folder, on disk when it has finished."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=True, overwrite=False)
        self._disk = self.fs = _Disk()

    @property
    def written(self) -> dict[str, SavedFile]:
        """What this rank has written."""
        return dict(self._disk.written)


def saved_tensor(metadata: Metadata, key: str) -> TensorStorageMetadata | None:
    """What is known of a saved tensor; None: there is none of that name."""
    found = metadata.state_dict_metadata.get(key)
    return found if isinstance(found, TensorStorageMetadata) else None


def check_pieces(checkpoint: str | Path, metadata: Metadata, pieces: Pieces, *, cast: bool = False) -> None:
    """BaPipeError unless the checkpoint has all pieces, in the same dtype and shape of the whole.

    With `cast` one floating dtype may stand for another.
    """
    for key, wanted in pieces.items():
        saved = saved_tensor(metadata, key)
        if saved is None:
            raise BaPipeError(f"{checkpoint} has no '{_plain(key)}'; give a checkpoint of this model")
        for piece in wanted:
            was, now = saved.properties.dtype, piece.tensor.dtype
            same = was == now or (cast and was.is_floating_point and now.is_floating_point)
            if tuple(saved.size) != piece.whole or not same:
                raise BaPipeError(
                    f"'{_plain(key)}' is {_described(saved.size, saved.properties.dtype)} in {checkpoint} and "
                    f"{_described(piece.whole, piece.tensor.dtype)} here; give a checkpoint of this model"
                )


def boxes_to_read(metadata: Metadata, pieces: Pieces) -> list[ReadItem]:
    """Which part of which saved box goes where in the pieces."""
    items: list[ReadItem] = []
    for key, wanted in pieces.items():
        saved = saved_tensor(metadata, key)
        assert saved is not None
        items += create_read_items_for_chunk_list(key, saved, [piece.box for piece in wanted])
    return items


def place_box(pieces: Pieces, item: ReadItem, saved: Tensor) -> None:
    """Copy what an item wants of a saved box to its place."""
    target = _find(pieces, item.dest_index)
    for dim, length in enumerate(item.lengths):
        saved = saved.narrow(dim, item.storage_offsets[dim], length)
        target = target.narrow(dim, item.dest_offsets[dim], length)
    target.copy_(saved)


def _plain(key: str) -> str:
    """The model's own name, and what of the optimizer's state of it."""
    found = optimizer_name(key)
    return f"{found[1]} of {found[0]}" if found is not None else model_name(key) or key


def _described(shape: Sequence[int], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"
