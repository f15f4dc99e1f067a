"""TinyLlama's shape with LoRA adapters (Hu et al., 2021) in plain torch, so that peft is not needed.

All of the model's own weights are frozen; the projections of queries and values have an adapter each.
"""

from __future__ import annotations

from typing import Any

import torch
from model import build as build_llama
from torch import Tensor, nn

__all__ = ["Adapted", "build"]

TARGETS = ("q_proj", "v_proj")


class Adapted(nn.Module):
    """A frozen linear layer and a product of two small matrices beside it, which is 0 at first."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base, self.scale = base, 2.0
        generator = torch.Generator().manual_seed(0)
        first = torch.randn(rank, base.in_features, generator=generator) / base.in_features**0.5
        self.down, self.up = nn.Parameter(first), nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, value: Tensor) -> Tensor:
        small = nn.functional.linear(value, self.down)
        made: Tensor = self.base(value) + self.scale * nn.functional.linear(small, self.up)
        return made


def build(
    *, sequence: int = 1024, rank: int = 16, tiny: bool = False
) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """The module and an example of its inputs; under 1 % of the parameters of the full size are trained."""
    module, args, kwargs = build_llama(sequence=sequence, tiny=tiny)
    module.requires_grad_(False)
    for owner in list(module.modules()):
        for name in TARGETS:
            linear = getattr(owner, name, None)
            if isinstance(linear, nn.Linear):
                setattr(owner, name, Adapted(linear, rank))
    return module, args, kwargs
