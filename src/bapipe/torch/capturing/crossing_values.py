"""What crosses each cut, and where a cut may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, fx

from bapipe.torch.capturing.linearise import Program
from bapipe.torch.capturing.torch_internals import size_at

__all__ = ["Cuts", "Value", "crossing", "dims_of", "find_cuts", "memory_order", "value_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A tensor that crosses a cut, as it is sent: contiguous, dimensions in the order of the model's memory.

    Each dimension has `a · samples + b` entries. Stages put the dimensions in order themselves, without a copy;
    were the layout lost, dropout would draw its numbers in another order than in eager.
    """

    name: str
    """the traced node's; unique within one capture, not the same under another version of torch"""
    dims: tuple[tuple[int, int], ...]
    """(a, b) of each dimension"""
    dtype: torch.dtype
    requires_grad: bool
    """whether an error comes back for it; integers, booleans and values without gradient have none"""

    def shape(self, batch: int) -> tuple[int, ...]:
        """The shape for so many samples."""
        return tuple(a * batch + b for a, b in self.dims)

    def elements(self, batch: int) -> int:
        return prod(self.shape(batch))

    def bytes(self, batch: int) -> int:
        return self.elements(batch) * self.dtype.itemsize

    @property
    def bytes_per_sample(self) -> int:
        """What one more sample adds."""
        return self.bytes(2) - self.bytes(1)

    @property
    def bytes_fixed(self) -> int:
        """What crosses whatever the number of samples."""
        return self.bytes(1) - self.bytes_per_sample


def value_of(program: Program, node: fx.Node) -> Value:
    """Describe a node's tensor. Without a free batch, a first dimension that the batch divides counts samples."""
    tensor = node.meta["val"]
    dims = dims_of(program, tensor)
    ordered = tuple(dims[index] for index in memory_order(program, tensor))
    return Value(name=node.name, dims=ordered, dtype=tensor.dtype, requires_grad=node in program.gradients)


def dims_of(program: Program, tensor: Tensor) -> tuple[tuple[int, int], ...]:
    """(a, b) of each dimension, which has a · samples + b entries."""
    batch = program.batch
    one, two = program.sizes(tensor, batch), program.sizes(tensor, 2 * batch)
    dims = []
    for index, (a, b) in enumerate(zip(one, two, strict=True)):
        guessed = a // batch if index == 0 and a % batch == 0 else 0
        slope = (b - a) // batch if program.dynamic else guessed
        dims.append((slope, a - slope * batch))
    return tuple(dims)


def memory_order(program: Program, tensor: Tensor) -> tuple[int, ...]:
    """Dimensions from the slowest to the fastest in memory; as they are if the tensor repeats itself."""
    strides = [size_at(stride, program.batch) for stride in tensor.stride()]
    if 0 in strides:
        return tuple(range(tensor.ndim))
    return tuple(sorted(range(tensor.ndim), key=lambda dim: (-strides[dim], dim)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cuts:
    """Per position p (a cut before step p): whether it may be cut there, how many values cross and their bytes."""

    valid: tuple[bool, ...]
    count: tuple[int, ...]
    bytes: tuple[int, ...]


def crossing(program: Program, position: int) -> tuple[fx.Node, ...]:
    """Values that cross the cut before that step, in the order they were computed; none at either end."""
    if not 0 < position < len(program.steps):
        return ()
    return tuple(node for node, first, last in program.spans if first <= position <= last)


def find_cuts(program: Program) -> Cuts:
    """Count and validity for every position; linear in steps and in what crosses."""
    end = len(program.steps)
    count, size = [0] * (end + 2), [0] * (end + 2)
    for node, first, last in program.spans:
        tensor = node.meta["val"]
        amount = prod(program.sizes(tensor)) * tensor.dtype.itemsize
        count[first] += 1
        count[last + 1] -= 1
        size[first] += amount
        size[last + 1] -= amount
    locked = [0] * (end + 2)
    for low, high, _ in program.locks:
        locked[low + 1] += 1
        locked[high + 1] -= 1
    counts, sizes, locks = _running(count), _running(size), _running(locked)
    return Cuts(
        valid=tuple(0 < p < end and not locks[p] for p in range(end + 1)),
        count=tuple(counts[: end + 1]),
        bytes=tuple(sizes[: end + 1]),
    )


def _running(changes: Sequence[int]) -> list[int]:
    total, result = 0, []
    for change in changes:
        total += change
        result.append(total)
    return result
