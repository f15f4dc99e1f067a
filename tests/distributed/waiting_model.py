"""A small model whose tenth global batch comes only once a file exists: time for others to do what they want."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FEATURES = 4
asked: dict[str, Any] = {"calls": 0}


def build(*, note: str) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    asked["note"] = note
    layers = [nn.Linear(FEATURES, FEATURES) for _ in range(3)]
    return nn.Sequential(*layers).double(), (torch.zeros(1, FEATURES, dtype=torch.float64),), {}


def make_batch(seed: int, size: int) -> tuple[Tensor, Tensor]:
    asked["calls"] += 1
    if asked["calls"] == 10:
        Path(f"{asked['note']}-waits").touch()
        while not Path(asked["note"]).exists():
            time.sleep(0.05)
    generator = torch.Generator().manual_seed(seed)
    data, target = (torch.randn(size, FEATURES, generator=generator, dtype=torch.float64) for _ in range(2))
    return data, target


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)
