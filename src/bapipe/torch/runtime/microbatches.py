"""A global batch cut into micro-batches, as the plan says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bapipe.errors import BaPipeError
from bapipe.torch.capturing import Captured
from bapipe.torch.capturing.torch_internals import flatten, unflatten

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
    structure: Any
    """how the leaves make up (args, kwargs)"""

    @classmethod
    def of(cls, captured: Captured) -> InputSpec:
        leaves = captured.examples.leaves
        return cls(
            keywords=captured.examples.keywords,
            batched=captured.examples.batched,
            dtypes=tuple(leaf.dtype if isinstance(leaf, Tensor) else None for leaf in leaves),
            shapes=tuple(tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves),
            structure=captured.examples.spec,
        )

    def call(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """(args, kwargs) from leaves."""
        args, kwargs = unflatten(leaves, self.structure)
        return args, kwargs

    def leaves(self, inputs: Any) -> list[Any]:
        """Inputs taken apart: a tensor, a tuple of args, a dict of kwargs, or args and then such a dict."""
        args, kwargs = _as_call(inputs, self.keywords)
        if kwargs.keys() != set(self.keywords):
            raise BaPipeError(
                f"the model was captured with the keyword arguments {', '.join(self.keywords) or 'none'}, got "
                f"{', '.join(map(str, kwargs)) or 'none'}; give the same"
            )
        leaves, _ = flatten((args, {key: kwargs[key] for key in self.keywords}))
        if len(leaves) != len(self.batched):
            raise BaPipeError(
                f"the model was captured with {len(self.batched)} inputs, got {len(leaves)}; "
                "give inputs of the same structure as the example"
            )
        return list(leaves)


def _as_call(inputs: Any, keywords: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, dict):
        return (), inputs
    if not isinstance(inputs, (tuple, list)):
        return (inputs,), {}
    args = tuple(inputs)
    if keywords and args and isinstance(args[-1], dict):
        return args[:-1], args[-1]
    return args, {}


def split_inputs(spec: InputSpec, inputs: Any, sizes: Sequence[int], *, needed: set[int]) -> list[list[Any]]:
    """Each micro-batch's leaves, where they lie; those that are not needed here are None.

    Refuses another number of samples than planned, another dtype and other dimensions than captured.
    """
    total = sum(sizes)
    parts: list[list[Any]] = [[] for _ in sizes]
    for index, leaf in enumerate(spec.leaves(inputs)):
        _check_leaf(spec, index, leaf, total)
        for part, piece in zip(parts, _pieces(spec, index, leaf, sizes), strict=True):
            part.append(piece if index in needed else None)
    return parts


def _pieces(spec: InputSpec, index: int, leaf: Any, sizes: Sequence[int]) -> Sequence[Any]:
    return torch.split(leaf, list(sizes)) if spec.batched[index] else [leaf] * len(sizes)


def _check_leaf(spec: InputSpec, index: int, leaf: Any, total: int) -> None:
    dtype, shape = spec.dtypes[index], spec.shapes[index]
    if dtype is None or shape is None:
        return
    if not isinstance(leaf, Tensor):
        raise BaPipeError(f"input {index} must be a tensor, got {type(leaf).__name__}; give what was captured")
    if leaf.dtype != dtype:
        raise BaPipeError(
            f"input {index} is {_plain(leaf.dtype)}, the model was captured with {_plain(dtype)}; convert it"
        )
    expected = (total, *shape[1:]) if spec.batched[index] else shape
    if spec.batched[index] and leaf.ndim and leaf.shape[0] != total:
        raise BaPipeError(
            f"input {index} has {leaf.shape[0]} samples, the plan is for a mini-batch of {total}; "
            "give so many (a DataLoader with drop_last=True) or plan another --minibatch"
        )
    if tuple(leaf.shape) != expected:
        raise BaPipeError(
            f"input {index} has shape {tuple(leaf.shape)}, the model was captured for {expected}; "
            "give that, or capture and plan again"
        )


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
                    f"the target has {leaf.shape[0]} samples, the plan is for a mini-batch of {total}; "
                    "give so many or plan another --minibatch"
                )
            pieces: Sequence[Any] = torch.split(leaf.to(device, non_blocking=True), list(sizes))
        else:
            pieces = [leaf] * len(sizes)
        for part, piece in zip(parts, pieces, strict=True):
            part.append(piece)
    return [unflatten(part, structure) for part in parts]
