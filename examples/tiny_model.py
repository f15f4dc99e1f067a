"""A small classifier to run a plan with: an MLP on made-up images of 8 × 8 pixels, ten classes.

`examples.tiny_model:build` is the reference in examples/tiny-profile.json. Beside the function that a reference
names, `bapipe run` looks for `make_batch` and `loss`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["build", "loss", "make_batch"]

PIXELS, CLASSES = 64, 10


def build(
    *, hidden: int = 1024, layers: int = 8, float64: bool = False
) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """The module and an example of its input; each layer is a child, so a cut can go after any."""
    dtype = torch.float64 if float64 else torch.float32
    blocks: OrderedDict[str, nn.Module] = OrderedDict()
    for index in range(layers - 1):
        width = PIXELS if index == 0 else hidden
        blocks[f"layer{index}"] = nn.Sequential(nn.Linear(width, hidden, dtype=dtype), nn.Tanh())
    blocks["head"] = nn.Linear(hidden if layers > 1 else PIXELS, CLASSES, dtype=dtype)
    return nn.Sequential(blocks), (torch.zeros(1, PIXELS, dtype=dtype),), {}


def make_batch(seed: int, size: int) -> tuple[Tensor, Tensor]:
    """Images and their classes: each class is one fixed pattern under noise."""
    patterns = torch.rand(CLASSES, PIXELS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(CLASSES, (size,), generator=generator)
    noise = torch.randn(size, PIXELS, generator=generator, dtype=torch.float64)
    return patterns[target] + 0.3 * noise, target


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy, the mean over the samples."""
    return nn.functional.cross_entropy(output, target)
