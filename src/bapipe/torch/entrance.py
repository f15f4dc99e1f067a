"""Where received values enter a stage's graph: their errors come out here, and nothing holds the values.

A leaf is held by its graph to the end of the backward, needed or not; of what an LSTM behind a dropout receives
nothing is. Values that come out of an operation live as long as something in the graph has saved them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["Entrance"]


class Entrance:
    """The values of one micro-batch that get errors."""

    def __init__(self, values: Sequence[Tensor]) -> None:
        self._about = [(value.shape, value.dtype, value.device) for value in values]
        self._errors: list[Tensor] = []
        token = torch.empty(0, requires_grad=True)  # makes what comes out require a gradient
        self.values: tuple[Tensor, ...] = ()
        """to run the stage with; let go of them then"""
        if values:
            self.values = _Enter.apply(self._errors, token, *values)  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Let go of the values."""
        self.values = ()

    def errors(self) -> tuple[Tensor, ...]:
        """After the backward: one for each value, zeros where nothing has come back."""
        if self._errors:
            return tuple(self._errors)
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in self._about)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, errors: list[Tensor], _token: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.errors = errors
        return values

    @staticmethod
    def backward(ctx: Any, *errors: Tensor) -> tuple[None, ...]:
        ctx.errors.extend(errors)
        return (None,) * (2 + len(errors))
