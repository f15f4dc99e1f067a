"""What the models of the zoo share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from bapipe.errors import BaPipeError

__all__ = ["Built", "classes_loss", "finish", "images", "require", "tokens"]

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""(module, args, kwargs): the module and an example of its inputs"""


def require(**values: int) -> None:
    """Refuse sizes under 1."""
    for name, value in values.items():
        if value < 1:
            raise BaPipeError(f"{name} must be at least 1, got {value}; raise it")


def images(batch: int, side: int, classes: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Noise and classes."""
    generator = torch.Generator().manual_seed(seed)
    pictures = torch.randn(batch, 3, side, side, generator=generator)
    return pictures, torch.randint(classes, (batch,), generator=generator)


def tokens(batch: int, sequence: int, vocabulary: int, *, seed: int = 0) -> Tensor:
    """Random tokens."""
    return torch.randint(vocabulary, (batch, sequence), generator=torch.Generator().manual_seed(seed))


def classes_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy over the last dimension (or the second, of an image's logits), the mean over all."""
    if output.ndim == 3:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())
    return nn.functional.cross_entropy(output, target)


def finish(
    module: nn.Module, inputs: tuple[Tensor, ...], target: Tensor, *, with_loss: bool, float64: bool
) -> Built:
    """The module in training mode and its example, in float64 if asked."""
    module.train()
    if float64:
        module.double()
        inputs = tuple(value.double() if value.is_floating_point() else value for value in inputs)
        target = target.double() if target.is_floating_point() else target
    return module, inputs, {"target": target} if with_loss else {}
