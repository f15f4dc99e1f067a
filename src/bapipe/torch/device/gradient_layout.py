"""Gradients laid out in memory as their weights are, as autograd has them: fused optimizers take no others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["add_gradient", "add_gradients"]


def add_gradient(value: Tensor, gradient: Tensor, *, shared: bool) -> None:
    """Add to a value's `.grad`. `shared`: others may be given the same tensor, so that the first one is copied."""
    if value.grad is not None:
        value.grad.add_(gradient)
    elif gradient.layout != torch.strided:
        value.grad = gradient.clone() if shared else gradient
    elif shared or gradient.stride() != value.stride():
        value.grad = torch.empty_like(value).copy_(gradient)
    else:
        value.grad = gradient


def add_gradients(values: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Add to the `.grad` of several values, in one kernel for all that have one: a layer has many small ones.

    Two values may be given the same tensor.
    """
    sums: list[Tensor] = []
    added: list[Tensor] = []
    taken: set[int] = set()
    for value, gradient in zip(values, gradients, strict=True):
        if value.grad is None:
            add_gradient(value, gradient, shared=id(gradient) in taken)
            taken.add(id(gradient))
        else:
            sums.append(value.grad)
            added.append(gradient)
    if sums:
        torch._foreach_add_(sums, added)
