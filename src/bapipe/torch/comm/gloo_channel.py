"""A gloo group that a transport has to itself, and may wait on from its threads for as long as it takes.

Threads may post and wait at once, each on works of its own: gloo locks its pairs and buffers. What a group may not
see is a wait that runs out, because gloo then fails everything that is under way on it, with every peer. So waits
here have no end, and those who need a result look at the clock (`result_of`). `break_off` uses that same failure
to free threads that still wait: torch offers no other way to end a wait of gloo.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.torch.comm.channel import guarded
from bapipe.torch.comm.gloo_groups import gloo_group

__all__ = ["Posts"]

_FOR_EVER = datetime.timedelta(days=365)
_BREAK_TAG = 0
"""below every channel's"""


class Posts:
    """`isend`, `irecv` and endless waits, of tensors in host memory."""

    def __init__(self, timeout: float) -> None:
        """Collective: every rank of the default group makes one, within `timeout` seconds."""
        self._group = gloo_group(timeout=datetime.timedelta(seconds=timeout))

    def send(self, value: Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to send; keep both the tensor and the work until `wait`."""
        return self._posted(dist.isend, value, peer, tag)

    def receive(self, value: Tensor, peer: int, tag: int) -> dist.Work:
        """Begin to receive; keep both the tensor and the work until `wait`."""
        return self._posted(dist.irecv, value, peer, tag)

    def _posted(self, post: Callable[..., dist.Work | None], value: Tensor, peer: int, tag: int) -> dist.Work:
        with guarded(peer):
            work = post(value, peer, group=self._group, tag=tag)
        assert work is not None, "this rank is not in the group"
        return work

    def wait(self, work: dist.Work, peer: int) -> None:
        """Wait until it is done or the peer is gone, which is a LinkError."""
        with guarded(peer):
            work.wait(_FOR_EVER)

    def break_off(self) -> None:
        """Fail all that is under way, here and at the peers. The group is of no more use."""
        for peer in range(dist.get_world_size()):
            if peer == dist.get_rank():
                continue
            # With a peer that is gone this fails before it can run out: then the next one's must.
            with contextlib.suppress(RuntimeError, ValueError):
                nothing = torch.empty(1)
                work = dist.irecv(nothing, peer, group=self._group, tag=_BREAK_TAG)
                assert work is not None, "this rank is not in the group"
                work.wait(datetime.timedelta(milliseconds=1))
