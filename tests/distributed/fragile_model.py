"""A model whose second layer does what the test asks: it is killed at a given forward, raises or never returns.

Or, if it is to be steady, it writes over its input.
"""

from __future__ import annotations

import os
import signal
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class Fragile(nn.Module):
    def __init__(self, how: str, at: int, note: str) -> None:
        super().__init__()
        self.how, self.left, self.note = how, at, note

    def forward(self, value: Tensor) -> Tensor:
        if value.is_meta:
            return value.clone()
        if self.left == 0:
            Path(self.note).write_text(str(time.time()), encoding="ascii")
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "hang":
                time.sleep(600)
            raise ValueError("the layer broke\nas the test asked")
        self.left -= 1
        return value * 1.0


def build(*, how: str, at: int, note: str) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    second = nn.ReLU(inplace=True) if how == "steady" else Fragile(how, at, note)
    layers = OrderedDict(first=nn.Linear(4, 4), second=second, third=nn.Linear(4, 2))
    return nn.Sequential(layers).double(), (torch.zeros(1, 4, dtype=torch.float64),), {}


def make_batch(seed: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((size, 4), (size, 2))
    data, target = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return data, target


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)
