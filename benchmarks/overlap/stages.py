"""The stage that every system trains: it sends as much as a real one, and sleeps where a real one computes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["HEAD", "Case", "SleepingStage", "TinyStage", "loss", "make_stage", "sleep_until"]

HEAD = 16
"""entries of a message that are computed with; the rest is carried, for computing is emulated by sleeping"""
_SPIN = 0.0003
"""seconds; a sleep ends about 0.1 ms late, so the last part is waited for awake"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is trained."""

    floats: int
    """of one message"""
    forward: float
    """seconds a stage computes; 0: a small linear layer in its place"""
    backward: float
    """half of it for the input's gradient, half for the weight's, so that zero-bubble orders can part them"""
    microbatches: int


def sleep_until(moment: float) -> None:
    """Until `time.perf_counter()` says so."""
    left = moment - time.perf_counter()
    if left > _SPIN:
        time.sleep(left - _SPIN)
    while time.perf_counter() < moment:
        pass


class _SlowBackward(torch.autograd.Function):
    """The same value; its gradient takes some seconds."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        end = time.perf_counter() + ctx.seconds
        # A new tensor, as computing makes; autograd would copy one that others hold, after the time is up.
        made = gradient.clone()
        sleep_until(end)
        return made, None


class _AddToHead(torch.autograd.Function):
    """A number added to the first entries: a whole message is made, and the backward is next to free."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, number: Tensor) -> Tensor:  # noqa: ARG004
        made = value.clone()
        made[:, :HEAD] += number
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # noqa: ARG004
        return gradient, gradient[:, :HEAD].sum().reshape(1)


class SleepingStage(nn.Module):
    """Adds a weight. Forward and backward take as long as they are told, and next to nothing more."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5 + rank]))
        self._case = case

    def forward(self, value: Tensor) -> Tensor:
        end = time.perf_counter() + self._case.forward
        half = self._case.backward / 2
        if not value.requires_grad:
            # The first stage's input is data; its backward is to be as long as the others'.
            value = value.detach().requires_grad_()
        made: Tensor = _AddToHead.apply(_SlowBackward.apply(value, half), _SlowBackward.apply(self.weight, half))
        sleep_until(end)
        return made


class TinyStage(nn.Module):
    """As little compute as training has, so that what is left is the runtime's own work."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.linear = nn.Linear(case.floats, case.floats)

    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = self.linear(value)
        return made


def make_stage(case: Case, rank: int) -> nn.Module:
    return SleepingStage(case, rank) if case.forward else TinyStage(case, rank)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """A mean whose gradient depends on the data, so that equal gradients mean something."""
    return ((output[:, :HEAD] - target) ** 2).mean()
