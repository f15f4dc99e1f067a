"""Dropout in a compiled layer, with the random numbers that the layer draws eagerly.

The mask is made by an operation of its own, which seeds the generator as `seed_node` does before it draws. What
the mask is multiplied with is ordinary arithmetic, which the compiler fuses with its neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bapipe.torch.capturing.seeded_rng import Position, seed_rng

__all__ = ["random_key", "seeded_dropout"]

_UNSEEDED = -1
"""in place of step and micro-batch where the generator is left alone"""


def random_key(position: Position | None, numbers: tuple[int, ...]) -> Tensor:
    """What a compiled layer takes as an input: step, micro-batch, and the number of each of its random nodes."""
    return torch.tensor([*(position or (_UNSEEDED, _UNSEEDED)), *numbers])


@torch.library.custom_op("bapipe::dropout_mask", mutates_args=())
def _dropout_mask(like: Tensor, probability: float, key: Tensor, place: int) -> Tensor:
    """Which entries stay; `place` is the random node's place among those of its layer."""
    step, microbatch, *numbers = key.tolist()
    if step != _UNSEEDED:
        seed_rng(step, microbatch, numbers[place], like.device)
    if like.is_cuda and 0 < probability < 1:
        return torch.native_dropout(torch.empty_like(like), probability, True)[1]
    return torch.empty_like(like).bernoulli_(1 - probability).to(torch.bool)


@_dropout_mask.register_fake
def _(like: Tensor, probability: float, key: Tensor, place: int) -> Tensor:  # noqa: ARG001
    return torch.empty_like(like, dtype=torch.bool)


def seeded_dropout(value: Tensor, probability: float, key: Tensor, place: int) -> Tensor:
    """`torch.dropout(value, probability, True)` with the numbers of a random node."""
    mask: Tensor = _dropout_mask(value.detach(), probability, key, place)
    if probability == 1:
        return value * mask
    return value * mask * (1 / (1 - probability))
