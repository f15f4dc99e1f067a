"""Small models for the tests of measuring, as `package.module:function` would name them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

__all__ = ["LIMIT", "broken", "greedy", "picky", "residual", "sequential", "wrong"]

LIMIT = 4
"""samples that `greedy` has memory for"""


class Double(torch.autograd.Function):
    """Twice the value; what calls it is kept whole by a capture, and so runs as it is."""

    @staticmethod
    def forward(_: Any, value: Tensor) -> Tensor:
        return value * 2

    @staticmethod
    def backward(_: Any, *errors: Tensor) -> Tensor:
        return errors[0] * 2


class Greedy(nn.Module):
    """Runs out of memory over LIMIT samples, as a GPU would."""

    def forward(self, value: Tensor) -> Tensor:
        if len(value) > LIMIT:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return cast(Tensor, Double.apply(value))


class Picky(nn.Module):
    """Refuses more than LIMIT samples, for no reason of memory."""

    def forward(self, value: Tensor) -> Tensor:
        if len(value) > LIMIT:
            raise ValueError("too many samples")
        return cast(Tensor, Double.apply(value))


class Residual(nn.Module):
    """A skip value over a cut, a tied weight, dropout, integers in and a dict out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(50, width)
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        value = self.table(tokens)
        hidden = torch.relu(self.first(value))
        return {"logits": self.head(self.dropout(self.second(hidden)) + value)}


def sequential(*, width: int = 32, layers: int = 3) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A plain chain; the last but one layer writes over its input."""
    blocks: list[nn.Module] = [nn.Linear(8 if index == 0 else width, width) for index in range(layers)]
    return nn.Sequential(*blocks, nn.ReLU(inplace=True), nn.Linear(width, 5)), (torch.randn(2, 8),), {}


def residual(*, width: int = 64) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return Residual(width), (torch.randint(50, (2, 7)),), {}


def greedy() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return nn.Sequential(nn.Linear(8, 8), Greedy(), nn.Linear(8, 2)), (torch.randn(2, 8),), {}


def picky() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    return nn.Sequential(nn.Linear(8, 8), Picky()), (torch.randn(2, 8),), {}


def broken(*, size: int = 1) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    raise ValueError(f"no such size {size}\nsecond line")


def wrong() -> nn.Module:
    return nn.Linear(2, 2)
