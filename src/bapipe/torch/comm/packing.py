"""A message as one run of bytes: one transfer for all of its tensors, whatever their types."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from bapipe.torch.comm.channel import Message, TensorShape

__all__ = ["message_of", "packed_size", "unpacked"]

_ALIGNMENT = 64
"""bytes; every tensor begins at a multiple, which all types and the GPU's widest loads can live with"""


def message_of(values: Sequence[Tensor]) -> Message:
    """What the receiver of these tensors must know."""
    return tuple(TensorShape(shape=tuple(value.shape), dtype=value.dtype) for value in values)


def _nbytes(about: TensorShape) -> int:
    return math.prod(about.shape) * about.dtype.itemsize


def _room(about: TensorShape) -> int:
    return -(-_nbytes(about) // _ALIGNMENT) * _ALIGNMENT


def packed_size(message: Message) -> int:
    """Bytes of the whole message; never 0, so that a message without content is still sent."""
    return max(sum(_room(about) for about in message), _ALIGNMENT)


def unpacked(buffer: Tensor, message: Message) -> tuple[Tensor, ...]:
    """The message's tensors as views of a flat uint8 buffer of at least `packed_size` bytes."""
    views: list[Tensor] = []
    start = 0
    for about in message:
        views.append(buffer[start : start + _nbytes(about)].view(about.dtype).view(about.shape))
        start += _room(about)
    return tuple(views)
