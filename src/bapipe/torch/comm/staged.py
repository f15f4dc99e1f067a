"""CUDA tensors over gloo, by way of pinned host memory; works wherever gloo does.

gloo itself cannot read a GPU's memory ("Bad address", and the group is lost). Sending is: copy to the host behind
the compute, on a stream of its own; a thread waits for the copy and then for gloo. Receiving is: gloo writes into
pinned memory, a thread waits for it and queues the copy to the GPU. A channel and direction has its own stream and
thread, so that one that waits holds up no other.

Pinned memory comes from torch's caching host allocator, because pinning takes milliseconds: it rounds to powers of
two, keeps what was freed for the next message, and never hands out memory with a copy under way. So it grows to
what was under way at once and no further; a message is under way until gloo has delivered it (sending) or its copy
to the GPU has ended (receiving).
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from bapipe.torch.comm.channel import Message, P2PChannel
from bapipe.torch.comm.copy_stream import CopyStream
from bapipe.torch.comm.gloo_channel import Posts
from bapipe.torch.comm.packing import message_of, packed_size, unpacked
from bapipe.torch.comm.worker_thread import WorkerThread, close_lanes, result_of

__all__ = ["StagedTransport"]

Landed = tuple[tuple[Tensor, ...], torch.cuda.Event]
"""tensors on the GPU and the event from which on they have their content"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _End:
    """This rank's end of a channel."""

    copies: CopyStream
    lane: WorkerThread


class StagedTransport:
    """gloo between host copies of CUDA tensors, a message at a time."""

    name = "staged"

    def __init__(self, device: torch.device, *, timeout: float) -> None:
        """Collective: every rank makes one at the same time. A wait ends after `timeout` seconds."""
        self._device = device
        self._timeout = timeout
        self._posts = Posts(timeout)
        self._ends: dict[P2PChannel, _End] = {}
        # Threads inside gloo when the process ends would abort it.
        atexit.register(self.close)

    def _end(self, channel: P2PChannel) -> _End:
        if channel not in self._ends:
            lane = WorkerThread(f"bapipe {channel.from_rank} to {channel.to_rank}, tag {channel.tag}")
            self._ends[channel] = _End(copies=CopyStream(self._device), lane=lane)
        return self._ends[channel]

    def receive(self, channel: P2PChannel, message: Message) -> Callable[[], tuple[Tensor, ...]]:
        end, peer = self._end(channel), channel.from_rank
        host = self._pinned(packed_size(message))
        work = self._posts.receive(host, peer, channel.tag)

        def land(landed: Future[Landed]) -> None:
            self._posts.wait(work, peer)
            values = end.copies.fresh(message)
            landed.set_result((values, end.copies.copy(zip(values, unpacked(host, message), strict=True))))

        landed = end.lane.submit(land)

        def wait() -> tuple[Tensor, ...]:
            values, copied = result_of(landed, peer, self._timeout)
            end.copies.adopt(values, copied)
            return values

        return wait

    def send(self, channel: P2PChannel, values: Sequence[Tensor]) -> Callable[[], None]:
        end, peer = self._end(channel), channel.to_rank
        kept = [value.detach().contiguous() for value in values]
        message = message_of(kept)
        host = self._pinned(packed_size(message))
        copied = end.copies.copy(zip(unpacked(host, message), kept, strict=True), after=end.copies.here())

        def deliver(delivered: Future[None]) -> None:
            copied.synchronize()
            kept.clear()
            self._posts.wait(self._posts.send(host, peer, channel.tag), peer)
            delivered.set_result(None)

        delivered = end.lane.submit(deliver)
        return lambda: result_of(delivered, peer, self._timeout)

    def _pinned(self, nbytes: int) -> Tensor:
        with torch.cuda.device(self._device):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def close(self) -> None:
        """End the threads; what is still under way fails, here and at the peers."""
        atexit.unregister(self.close)
        close_lanes([end.lane for end in self._ends.values()], self._posts.break_off)
        self._ends.clear()
