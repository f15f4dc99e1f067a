"""CUDA tensors between processes of one host, GPU memory to GPU memory; the processes may share one GPU.

Each channel has a few buffers, which the sender owns and the receiver maps (CUDA IPC), and notes that go over
gloo:

    sender    value ──copy──> buffer    note: buffer filled ──>
    receiver                                                    buffer ──copy──> new tensor
    sender    buffer is free, message delivered             <── note: buffer free

A note is sent when its copy has ended, which a thread waits for, and not when it is queued. An interprocess event
could let the peer's GPU wait instead; but a stream that waits for an event of a process that has died cannot be
asked to stop, and nothing here may hang.

The buffers are allocated at a channel's first message and anew where one is larger. They are `SLOTS` messages of
GPU memory per channel at its sending end, beyond what the tensors themselves take.
"""

from __future__ import annotations

import atexit
import pickle
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.errors import BaPipeError, first_line
from bapipe.torch.comm.channel import Message, P2PChannel
from bapipe.torch.comm.copy_stream import CopyStream
from bapipe.torch.comm.gloo_channel import Posts
from bapipe.torch.comm.ipc_handles import map_memory, share_memory
from bapipe.torch.comm.packing import message_of, packed_size, unpacked
from bapipe.torch.comm.rank_topology import gathered
from bapipe.torch.comm.worker_thread import WorkerThread, close_lanes, result_of
from bapipe.torch.device.allocator import mappable

__all__ = ["SLOTS", "IpcTransport", "ipc_problem"]

SLOTS = 2
"""buffers per channel: one is filled while the other is emptied"""
_GRAIN = 2**21
"""bytes; buffers are multiples of it, so that messages of about one size need no new ones"""
_NOTE = 4096
"""bytes of a note, of which a handle takes the most"""

Landed = tuple[tuple[Tensor, ...], torch.cuda.Event]
"""tensors on the GPU and the event from which on they have their content"""


def _note(slot: int, made: int, handle: bytes) -> Tensor:
    """Which buffer is filled, its generation in that slot, and how to map it."""
    text = pickle.dumps((slot, made, handle))
    if len(text) > _NOTE:
        raise BaPipeError(
            f"the handle of a shared buffer is {len(handle)} bytes long, more than the ipc transport can pass on; "
            "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False or use the staged transport"
        )
    return torch.frombuffer(bytearray(text.ljust(_NOTE, b"\0")), dtype=torch.uint8)


class _BufferSlot:
    """One buffer of a channel, at its sending end."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._made = 0
        self._handle = b""
        self.buffer = torch.empty(0, dtype=torch.uint8)

    def fit(self, nbytes: int, copies: CopyStream, device: torch.device) -> None:
        """Make sure that it holds so many bytes."""
        if self.buffer.numel() >= nbytes:
            return
        with torch.cuda.stream(copies.stream):
            self.buffer = mappable(-(-nbytes // _GRAIN) * _GRAIN, device)
            self._handle = share_memory(self.buffer)
        self._made += 1

    def note(self) -> Tensor:
        return _note(self.index, self._made, self._handle)


class _SendingEnd:
    """Fills buffers on one thread and takes them back on another: neither may wait for the other's peer."""

    def __init__(self, channel: P2PChannel, device: torch.device, posts: Posts) -> None:
        self._channel = channel
        self._device = device
        self._posts = posts
        self._copies = CopyStream(device)
        self._free: queue.SimpleQueue[_BufferSlot | BaseException] = queue.SimpleQueue()
        self._unused = [_BufferSlot(index) for index in range(SLOTS)]
        label = f"bapipe {channel.from_rank} to {channel.to_rank}, tag {channel.tag}"
        self._filling, self._freeing = WorkerThread(f"{label}, filling"), WorkerThread(f"{label}, freeing")
        self.lanes = (self._filling, self._freeing)

    def send(self, values: Sequence[Tensor]) -> Future[None]:
        """The future is fulfilled when the receiver has copied the values."""
        kept = [value.detach().contiguous() for value in values]
        ready = self._copies.here()
        message = message_of(kept)
        while self._unused:  # here, where nobody computes meanwhile: torch's pools are not safe from other threads
            slot = self._unused.pop(0)
            slot.fit(packed_size(message), self._copies, self._device)
            self._free.put(slot)

        def fill(delivered: Future[None]) -> None:
            slot = self._take_slot()
            try:
                slot.fit(packed_size(message), self._copies, self._device)
                pairs = zip(unpacked(slot.buffer, message), kept, strict=True)
                self._copies.copy(pairs, after=ready).synchronize()
                kept.clear()
                self._announce(slot, delivered)
            except BaseException as error:
                self._free.put(error)
                raise

        return self._filling.submit(fill)

    def _take_slot(self) -> _BufferSlot:
        slot = self._free.get()
        if isinstance(slot, BaseException):
            # The channel is broken, for the messages behind this one too.
            self._free.put(slot)
            raise slot
        return slot

    def _announce(self, slot: _BufferSlot, delivered: Future[None]) -> None:
        peer, tag = self._channel.to_rank, 2 * self._channel.tag
        note, answer = slot.note(), torch.empty(1, dtype=torch.uint8)
        answered = self._posts.receive(answer, peer, tag + 1)
        # With their tensors, which gloo reads and writes until they are done.
        under_way = [(self._posts.send(note, peer, tag), note), (answered, answer)]

        def freed(delivered: Future[None]) -> None:
            try:
                for work, _ in under_way:
                    self._posts.wait(work, peer)
            except BaseException as error:
                self._free.put(error)
                raise
            self._free.put(slot)
            delivered.set_result(None)

        self._freeing.submit(freed, future=delivered)


class _ReceivingEnd:
    """Copies out of mapped buffers, and says when it has."""

    def __init__(self, channel: P2PChannel, device: torch.device, posts: Posts) -> None:
        self._channel = channel
        self._posts = posts
        self._copies = CopyStream(device)
        self._mapped: dict[int, tuple[int, Tensor]] = {}
        self._lane = WorkerThread(f"bapipe {channel.from_rank} to {channel.to_rank}, tag {channel.tag}, receiving")
        self.lanes = (self._lane,)

    def receive(self, message: Message) -> Future[Landed]:
        peer, tag = self._channel.from_rank, 2 * self._channel.tag
        note = torch.empty(_NOTE, dtype=torch.uint8)
        noted = self._posts.receive(note, peer, tag)

        def land(landed: Future[Landed]) -> None:
            self._posts.wait(noted, peer)
            buffer = self._buffer(note)
            values = self._copies.fresh(message)
            copied = self._copies.copy(zip(values, unpacked(buffer, message), strict=True))
            landed.set_result((values, copied))
            copied.synchronize()
            answer = torch.zeros(1, dtype=torch.uint8)
            # A peer that is gone by now is noticed by whoever waits for its next message.
            self._posts.wait(self._posts.send(answer, peer, tag + 1), peer)

        return self._lane.submit(land)

    def adopt(self, landed: Landed) -> tuple[Tensor, ...]:
        self._copies.adopt(*landed)
        return landed[0]

    def _buffer(self, note: Tensor) -> Tensor:
        slot, made, handle = pickle.loads(note.numpy().tobytes())
        if slot not in self._mapped or self._mapped[slot][0] != made:
            self._mapped.pop(slot, None)
            with torch.cuda.stream(self._copies.stream):
                self._mapped[slot] = (made, map_memory(handle))
        return self._mapped[slot][1]


class IpcTransport:
    """Copies through buffers that two processes of one host share."""

    name = "ipc"

    def __init__(self, device: torch.device, *, timeout: float) -> None:
        """Collective: every rank makes one at the same time. A wait ends after `timeout` seconds."""
        self._device = device
        self._timeout = timeout
        self._posts = Posts(timeout)
        self._sending: dict[P2PChannel, _SendingEnd] = {}
        self._receiving: dict[P2PChannel, _ReceivingEnd] = {}
        # Threads inside gloo when the process ends would abort it.
        atexit.register(self.close)

    def receive(self, channel: P2PChannel, message: Message) -> Callable[[], tuple[Tensor, ...]]:
        if channel not in self._receiving:
            self._receiving[channel] = _ReceivingEnd(channel, self._device, self._posts)
        end = self._receiving[channel]
        landed = end.receive(message)
        return lambda: end.adopt(result_of(landed, channel.from_rank, self._timeout))

    def send(self, channel: P2PChannel, values: Sequence[Tensor]) -> Callable[[], None]:
        if channel not in self._sending:
            self._sending[channel] = _SendingEnd(channel, self._device, self._posts)
        delivered = self._sending[channel].send(values)
        return lambda: result_of(delivered, channel.to_rank, self._timeout)

    def close(self) -> None:
        """End the threads and unmap the buffers; what is still under way fails, here and at the peers."""
        atexit.unregister(self.close)
        lanes = [lane for sending in self._sending.values() for lane in sending.lanes]
        lanes += [lane for receiving in self._receiving.values() for lane in receiving.lanes]
        close_lanes(lanes, self._posts.break_off)
        self._sending.clear()
        self._receiving.clear()
        if lanes:
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def ipc_problem(device: torch.device) -> str | None:
    """Why the ranks cannot map each other's GPU memory; None where each can map its neighbour's. Collective."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if world == 1:
        return None
    problem: str | None = None
    handle = b""
    try:
        own = mappable(_GRAIN, device).fill_(rank % 251)
        torch.cuda.synchronize(device)
        handle = share_memory(own)
    except (RuntimeError, OSError, AttributeError) as error:
        problem = first_line(error)
    neighbour = (rank + 1) % world
    handles = gathered(handle)
    if handles[neighbour]:
        try:
            found = map_memory(handles[neighbour])[:: _GRAIN // 8].tolist()
            if found != [neighbour % 251] * 8:
                problem = f"rank {rank} mapped memory of rank {neighbour} and read something else"
        except (RuntimeError, OSError, AttributeError) as error:
            problem = first_line(error)
    # Also a barrier: nobody lets go of memory that a neighbour still reads.
    return next((said for said in gathered(problem) if said), None)
