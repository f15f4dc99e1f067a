"""Where received values enter a stage's graph: their gradients come out here, and nothing holds the values.

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
    """Catches the gradients of one micro-batch."""

    def __init__(self) -> None:
        self._about: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self._gradients: list[Tensor] = []

    def enter(self, received: Sequence[Tensor], takes_gradient: Sequence[bool]) -> tuple[Tensor, ...]:
        """What to run the stage with in place of what was received; what takes a gradient requires one."""
        wanted = [value for value, takes in zip(received, takes_gradient, strict=True) if takes]
        if not wanted:
            return tuple(received)
        self._about = [(value.shape, value.dtype, value.device) for value in wanted]
        token = torch.empty(0, requires_grad=True)  # makes what comes out require a gradient
        entered = iter(_Enter.apply(self._gradients, token, *wanted))  # type: ignore[no-untyped-call]
        return tuple(
            next(entered) if takes else value for value, takes in zip(received, takes_gradient, strict=True)
        )

    def gradients(self) -> tuple[Tensor, ...]:
        """After the backward: one for each value that takes one, zeros where nothing has come back."""
        if self._gradients:
            return tuple(self._gradients)
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in self._about)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], _token: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.gradients = gradients
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.gradients.extend(gradients)
        return (None,) * (2 + len(gradients))
