"""The index of a checkpoint's tensors: a pickle of torch.distributed.checkpoint's, read without running it.

Only the plain values that such an index consists of are made, and what it says is checked before anything is
allocated or read by it.
"""

from __future__ import annotations

import io
import itertools
import math
import pickle
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as index
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from bapipe.errors import first_line
from bapipe.torch.checkpoint.checkpoint_manifest import SavedFile

__all__ = ["parse_metadata"]


def _allowed(module: str, name: str) -> Any:
    """What an index may be made of: shapes, dtypes, and the classes of torch.distributed.checkpoint's metadata."""
    if module == "torch" and name == "Size":
        return torch.Size
    if module == "torch":
        found = getattr(torch, name, None)
        if isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
            return found
    if module == "torch.serialization" and name == "_get_layout":
        return _layout
    if module == index.__name__:
        found = getattr(index, name, None)
        if isinstance(found, type) and found.__module__ == module:
            return found
    if module == filesystem.__name__ and name == "_StorageInfo":
        return filesystem._StorageInfo
    if module.split(".")[0] == "pathlib":
        return PurePosixPath
    raise pickle.UnpicklingError(f"it holds {module}.{name}"[:200])


def _layout(name: str) -> torch.layout:
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.layout):
        raise pickle.UnpicklingError("it holds an unknown layout")
    return found


class _Verified(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _allowed(module, name)


class _Unverified(pickle._Unpickler):
    """In Python: the fast one sets memory aside for whatever count a flipped bit makes."""

    def find_class(self, module: str, name: str) -> Any:
        return _allowed(module, name)


def parse_metadata(data: bytes, files: Mapping[str, SavedFile], *, verified: bool) -> Metadata:
    """The index that these bytes are, of tensors in these files; ValueError, with words, if it is none."""
    kind = _Verified if verified else _Unverified
    try:
        found = kind(io.BytesIO(data)).load()
    except Exception as error:
        raise ValueError(f"is no index of tensors ({type(error).__name__}: {first_line(error)})") from None
    try:
        problem = _problem(found, files)
    except Exception as error:
        problem = type(error).__name__
    if problem is not None:
        raise ValueError(f"is no index of these files ({problem})")
    assert isinstance(found, Metadata)
    return found


def _problem(found: Any, files: Mapping[str, SavedFile]) -> str | None:
    if not isinstance(found, Metadata) or type(found.state_dict_metadata) is not dict:
        return "it is another object"
    if type(found.storage_data) is not dict:
        return "it has no places"
    for key, tensor in found.state_dict_metadata.items():
        if type(key) is not str or not isinstance(tensor, TensorStorageMetadata) or not _is_shape(tensor.size):
            return "it has what is no tensor"
        properties = tensor.properties
        if not isinstance(properties, TensorProperties) or not isinstance(properties.dtype, torch.dtype):
            return f"{key[:100]} has no dtype"
        if not _fills(tensor):
            return f"{key[:100]} is not all there"
        for chunk in tensor.chunks:
            place = found.storage_data.get(MetadataIndex(key, chunk.offsets))
            if not isinstance(place, filesystem._StorageInfo) or place.relative_path not in files:
                return f"{key[:100]} is in no file"
            least = math.prod(chunk.sizes) * properties.dtype.itemsize
            whole = files[place.relative_path].size
            inside = _is_count(place.offset) and _is_count(place.length) and place.offset + place.length <= whole
            if not inside or place.length < least or getattr(place, "transform_descriptors", None):
                return f"{key[:100]} is not in its file"
    return None


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_shape(value: Any) -> bool:
    return isinstance(value, torch.Size) and all(_is_count(size) for size in value)


def _fills(tensor: TensorStorageMetadata) -> bool:
    """Whether the boxes are the whole, and none lies over another."""
    boxes = tensor.chunks
    for box in boxes:
        if not isinstance(box, ChunkStorageMetadata) or not _is_shape(box.offsets) or not _is_shape(box.sizes):
            return False
        if not len(box.offsets) == len(box.sizes) == len(tensor.size):
            return False
        ends = (start + size for start, size in zip(box.offsets, box.sizes, strict=True))
        if any(end > whole for end, whole in zip(ends, tensor.size, strict=True)):
            return False
    if sum(math.prod(box.sizes) for box in boxes) != math.prod(tensor.size):
        return False
    return not any(_overlap(first, second) for first, second in itertools.combinations(boxes, 2))


def _overlap(first: ChunkStorageMetadata, second: ChunkStorageMetadata) -> bool:
    return all(
        max(begin, start) < min(begin + length, start + size)
        for begin, length, start, size in zip(
            first.offsets, first.sizes, second.offsets, second.sizes, strict=True
        )
    )
