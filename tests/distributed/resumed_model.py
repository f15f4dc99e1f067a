"""A small model whose structure depends on its arguments while its tensors do not. Imports of it stay cheap."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["build", "loss", "make_batch"]

FEATURES, HIDDEN, CLASSES = 8, 16, 4


class Scaled(nn.Module):
    """Multiplies with a buffer that no state_dict has."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.register_buffer("factors", torch.full((HIDDEN,), factor), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factors


def build(
    *, activation: str = "Tanh", dropout: float = 0.0, factor: float = 1.0
) -> tuple[nn.Module, tuple[Any, ...]]:
    """Four layers to cut between."""
    module = nn.Sequential(
        nn.Sequential(nn.Linear(FEATURES, HIDDEN), getattr(nn, activation)()),
        nn.Sequential(nn.Linear(HIDDEN, HIDDEN), Scaled(factor)),
        nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Dropout(dropout)),
        nn.Linear(HIDDEN, CLASSES),
    )
    return module, (torch.zeros(2, FEATURES),)


def make_batch(seed: int, size: int) -> tuple[Tensor, Tensor]:
    """Noise, and a class for each sample."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, FEATURES, generator=generator), torch.randint(CLASSES, (size,), generator=generator)


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy, the mean over the samples."""
    return nn.functional.cross_entropy(output, target)
