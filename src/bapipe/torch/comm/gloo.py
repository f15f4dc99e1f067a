"""Tensors in host memory over gloo.

gloo's send is a rendezvous: it ends when the peer has posted its receive. `Work.is_completed()` stays false until
`wait()`, so nobody can ask whether a send has ended; `Outbox` infers it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.torch.comm.channel import LinkError, Message, P2PChannel

__all__ = ["GlooTransport"]


class GlooTransport:
    """`isend` and `irecv` of a process group, a tag per boundary and direction."""

    name = "gloo"

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        """The default group where none is given; ranks are global ones either way."""
        self._given = group

    @cached_property
    def _group(self) -> dist.ProcessGroup:
        found = self._given or dist.group.WORLD
        assert found is not None, "there is no process group"
        return found

    @cached_property
    def _ranks(self) -> dict[int, int]:
        """Global rank -> rank in the group."""
        return {rank: index for index, rank in enumerate(dist.get_process_group_ranks(self._group))}

    def receive(self, channel: P2PChannel, message: Message) -> Callable[[], tuple[Tensor, ...]]:
        buffers = tuple(about.empty() for about in message)
        try:
            works = [self._posted(self._group.recv, buffer, channel.from_rank, channel.tag) for buffer in buffers]
        except RuntimeError as error:
            raise LinkError(channel.from_rank, error) from error

        def wait() -> tuple[Tensor, ...]:
            _wait(works, channel.from_rank)
            return buffers

        return wait

    def send(self, channel: P2PChannel, values: Sequence[Tensor]) -> Callable[[], None]:
        kept = [value.contiguous() for value in values]
        try:
            works = [self._posted(self._group.send, value, channel.to_rank, channel.tag) for value in kept]
        except RuntimeError as error:
            raise LinkError(channel.to_rank, error) from error

        def wait() -> None:
            _wait(works, channel.to_rank)
            kept.clear()

        return wait

    def _posted(self, post: Callable[..., dist.Work], value: Tensor, peer: int, tag: int) -> dist.Work:
        """As `dist.isend` and `dist.irecv` do, without their checks, which take as long as posting."""
        return post([torch.view_as_real(value) if value.is_complex() else value], self._ranks[peer], tag)

    def close(self) -> None:
        """Nothing is held."""


def _wait(works: Sequence[dist.Work], peer: int) -> None:
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        raise LinkError(peer, error) from error
