"""The interface that every transport has, and what it says when a peer is gone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from bapipe.errors import BaPipeError

__all__ = ["LinkError", "Message", "P2PChannel", "TensorShape", "Transport", "guarded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """What a receiver must know of a tensor before it comes."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def empty(self, device: torch.device | None = None, *, pin: bool = False) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device, pin_memory=pin)


Message = tuple[TensorShape, ...]
"""the tensors that cross a cut for one micro-batch, in order"""


@dataclass(frozen=True, slots=True, kw_only=True)
class P2PChannel:
    """One direction over one boundary, from one rank to one."""

    boundary: int
    """the stage before it"""
    onward: bool
    """True for activations, False for gradients"""
    from_rank: int
    to_rank: int

    @property
    def tag(self) -> int:
        """Messages of different boundaries and directions never meet."""
        return 1 + 2 * self.boundary + (0 if self.onward else 1)

    @property
    def reverse(self) -> P2PChannel:
        """The channel that answers."""
        return P2PChannel(
            boundary=self.boundary, onward=not self.onward, from_rank=self.to_rank, to_rank=self.from_rank
        )


class Transport(Protocol):
    """Moves messages along channels. Messages of one channel arrive in the order in which they are sent.

    All tensors lie on the device of the stage. Neither call blocks; what they return does.
    """

    name: str

    def receive(self, channel: P2PChannel, message: Message) -> Callable[[], tuple[Tensor, ...]]:
        """Post a receive. The function returned waits until the tensors are there (on CUDA: until the current
        stream may use them) and gives them."""

    def send(self, channel: P2PChannel, values: Sequence[Tensor]) -> Callable[[], None]:
        """Hand tensors over, as they will be when the current stream gets here. The function returned waits until
        they are delivered; they are kept until then."""

    def close(self) -> None:
        """Let go of threads and memory; nothing is under way any more."""


class LinkError(BaPipeError):
    """The peer has gone or does not answer."""

    def __init__(self, peer: int | None, error: BaseException) -> None:
        """`peer` is None where any other rank may be the one."""
        text = (str(error).splitlines() or [""])[0].lower()
        self.peer = peer
        self.late = "timed out" in text or "timeout" in text
        what = "did not answer in time" if self.late else "has ended or cannot be reached"
        super().__init__(f"{'another rank' if peer is None else f'rank {peer}'} {what}")


@contextlib.contextmanager
def guarded(peer: int | None) -> Iterator[None]:
    """What torch.distributed raises within is a LinkError."""
    try:
        yield
    except RuntimeError as error:
        raise LinkError(peer, error) from error
