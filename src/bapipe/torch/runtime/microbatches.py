"""What the model takes and its targets, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bapipe.errors import BaPipeError
from bapipe.torch.capturing import Captured
from bapipe.torch.capturing.torch_internals import flatten, unflatten
from bapipe.torch.inputs.batch_call import Call, as_call

__all__ = ["InputSpec", "split_inputs", "split_targets"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """What the model takes, without the model."""

    keywords: tuple[str, ...]
    batched: tuple[bool, ...]
    """per leaf, whether its first dimension counts samples"""
    dtypes: tuple[torch.dtype | None, ...]
    """per leaf, None for what is no tensor"""
    shapes: tuple[tuple[int, ...] | None, ...]
    """per leaf, of the example"""
    constants: tuple[Any, ...]
    """per leaf, the value that was captured where it is no tensor; the trace has it as a constant"""
    structure: Any
    """how the leaves make up (args, kwargs)"""
    length: int | None
    """positions of a sequence in the example, if it has sequences"""
    positions: tuple[tuple[int, ...], ...]
    """per leaf, the dimensions that count positions"""

    @classmethod
    def of(cls, captured: Captured) -> InputSpec:
        leaves = captured.examples.leaves
        return cls(
            keywords=captured.examples.keywords,
            batched=captured.examples.batched,
            dtypes=tuple(leaf.dtype if isinstance(leaf, Tensor) else None for leaf in leaves),
            shapes=tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves),
            constants=tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves),
            structure=captured.examples.spec,
            length=captured.examples.length,
            positions=captured.examples.positions,
        )

    def length_of(self, inputs: Any) -> int | None:
        """Positions of the sequences that these inputs have; None where the example has none."""
        for leaf, dims in zip(self.leaves(inputs), self.positions, strict=True):
            if dims and isinstance(leaf, Tensor) and leaf.ndim > dims[0]:
                return leaf.shape[dims[0]]
        return None

    def shape(self, index: int, samples: int, length: int | None) -> tuple[int, ...] | None:
        """Of a leaf, with so many samples of sequences of so many positions, None: as captured."""
        shape = self.shapes[index]
        if shape is None:
            return None
        sizes = list(shape)
        for dim in self.positions[index] if length is not None else ():
            assert length is not None
            sizes[dim] = length
        if self.batched[index]:
            sizes[0] = samples
        return tuple(sizes)

    def call(self, leaves: Sequence[Any]) -> Call:
        """(args, kwargs) from leaves."""
        return Call(*unflatten(leaves, self.structure))

    def leaves(self, inputs: Any) -> list[Any]:
        """Inputs taken apart: a tensor, a tuple of args, a dict or dataclass of kwargs, or args and then a dict.

        Constants of the captured call (False, None, numbers, strings) need not be given again.
        """
        call = as_call(inputs, self.keywords)
        args, kwargs = self._with_constants(call)
        if kwargs.keys() != set(self.keywords):
            raise BaPipeError(
                f"the model was captured with the keyword arguments {', '.join(self.keywords) or 'none'}, got "
                f"{', '.join(map(str, call.kwargs)) or 'none'}; give the same"
            )
        leaves, _ = flatten((args, {key: kwargs[key] for key in self.keywords}))
        if len(leaves) != len(self.batched):
            raise BaPipeError(
                f"the model was captured with {len(self.batched)} inputs, got {len(leaves)}; "
                "give inputs of the same structure as the example"
            )
        return list(leaves)

    def _with_constants(self, call: Call) -> Call:
        """The call with the captured constants that it leaves out."""
        if len(call.args) + len(call.kwargs) == len(self.keywords) + self._positional():
            return call
        args, kwargs = self.call(self.constants)
        tensors_in_args, tensors_in_kwargs = self.call(tuple(dtype is not None for dtype in self.dtypes))
        given = list(call.args)
        for value, tensors in list(zip(args, tensors_in_args, strict=True))[len(given) :]:
            if any(flatten(tensors)[0]):
                break
            given.append(value)
        constant = {key: kwargs[key] for key in kwargs if not any(flatten(tensors_in_kwargs[key])[0])}
        return Call(tuple(given), {**constant, **call.kwargs})

    def _positional(self) -> int:
        return len(self.call(self.constants).args)


def split_inputs(
    spec: InputSpec, inputs: Any, sizes: Sequence[int], *, needed: set[int], length: int | None = None
) -> list[list[Any]]:
    """Each micro-batch's leaves, where they lie; those that are not needed here are None.

    Refuses another number of samples than in `sizes`, another dtype and other dimensions than captured, but for
    sequences of `length`.
    """
    total = sum(sizes)
    parts: list[list[Any]] = [[] for _ in sizes]
    for index, leaf in enumerate(spec.leaves(inputs)):
        _check_leaf(spec, index, leaf, total, length)
        for part, piece in zip(parts, _pieces(spec, index, leaf, sizes), strict=True):
            part.append(piece if index in needed else None)
    return parts


def _pieces(spec: InputSpec, index: int, leaf: Any, sizes: Sequence[int]) -> Sequence[Any]:
    return torch.split(leaf, list(sizes)) if spec.batched[index] else [leaf] * len(sizes)


def _check_leaf(spec: InputSpec, index: int, leaf: Any, total: int, length: int | None) -> None:
    dtype, expected = spec.dtypes[index], spec.shape(index, total, length)
    if dtype is None or expected is None:
        if leaf is not spec.constants[index] and not _same(leaf, spec.constants[index]):
            raise BaPipeError(
                f"input {index} is {str(leaf)[:40]}, the model was captured with "
                f"{str(spec.constants[index])[:40]}, "
                "which is a constant of the capture; give that, leave it out, or profile and plan with the other"
            )
        return
    if not isinstance(leaf, Tensor):
        raise BaPipeError(f"input {index} must be a tensor, got {type(leaf).__name__}; give what was captured")
    if leaf.dtype != dtype:
        raise BaPipeError(
            f"input {index} is {_plain(leaf.dtype)}, the model was captured with {_plain(dtype)}; convert it"
        )
    if spec.batched[index] and leaf.ndim and leaf.shape[0] != total:
        raise BaPipeError(
            f"input {index} has {leaf.shape[0]} samples, the batch has {total}; give every input as many"
        )
    if tuple(leaf.shape) != expected:
        raise BaPipeError(
            f"input {index} has shape {tuple(leaf.shape)}, the model was captured for {expected}; "
            "give that, or capture and plan again"
        )


def _same(given: Any, captured: Any) -> bool:
    return type(given) is type(captured) and bool(given == captured)


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def split_targets(targets: Any, sizes: Sequence[int], device: torch.device) -> list[Any]:
    """Each micro-batch's target on the device: tensors in any structure, cut along their first dimension."""
    total = sum(sizes)
    leaves, structure = flatten(targets)
    parts: list[list[Any]] = [[] for _ in sizes]
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.ndim:
            if leaf.shape[0] != total:
                raise BaPipeError(
                    f"the target has {leaf.shape[0]} samples, the inputs have {total}; give as many of both"
                )
            pieces: Sequence[Any] = torch.split(leaf.to(device, non_blocking=True), list(sizes))
        else:
            pieces = [leaf] * len(sizes)
        for part, piece in zip(parts, pieces, strict=True):
            part.append(piece)
    return [unflatten(part, structure) for part in parts]
