"""The example's layers by name, each of which sleeps: 3 ms a forward, and on one rank, from a step on, 30 ms."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

FEATURES, CLASSES, LAYERS = 8, 4, 8
USUAL, SLOW = 0.003, 0.030
RANK = int(os.environ.get("RANK", "0"))
now = {"step": -1, "from": 1 << 30, "rank": -1}


class Sleeping(nn.Module):
    """Looks at its values, which no trace can follow, so that it is kept whole and its own code runs."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, outputs)

    def forward(self, value: Tensor) -> Tensor:
        if float(value.detach().sum()) == float("inf"):
            return value
        slow = now["rank"] == RANK and now["step"] >= now["from"]
        time.sleep(SLOW if slow else USUAL)
        return torch.tanh(self.inner(value))


def build(*, rank: int, first: int) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """The rank is slow from its `first` step on."""
    now.update({"rank": rank, "from": first})
    names = [*(f"layer{index}" for index in range(LAYERS - 1)), "head"]
    blocks = OrderedDict((name, Sleeping(CLASSES if name == "head" else FEATURES)) for name in names)
    return nn.Sequential(blocks), (torch.zeros(1, FEATURES),), {}


def make_batch(seed: int, size: int) -> tuple[Tensor, Tensor]:
    """Of step seed - 1, where the run has seed 0."""
    now["step"] = seed - 1
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(size, FEATURES, generator=generator)
    return data, torch.randint(CLASSES, (size,), generator=generator)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)
