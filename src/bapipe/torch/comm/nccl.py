"""CUDA tensors over NCCL, for ranks that each have a GPU, or a slice of one, to themselves.

NCCL matches the sends and receives of two ranks by their order alone and runs them one after another, so each
channel has a communicator of its own: nothing would order messages between channels. They are made in the
constructor, in the same order on every rank, because making one waits for both ranks.

NCCL refuses two ranks on one GPU, which it tells apart by host and bus id. Ranks on slices of one GPU have another
NCCL_HOSTID each, so that every slice is a host of its own, and talk through sockets. Separate GPUs must not have
one: it would turn NVLink and shared memory off.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.errors import BaPipeError
from bapipe.torch.comm.channel import LinkError, Message, P2PChannel, guarded
from bapipe.torch.comm.copy_stream import CopyStream
from bapipe.torch.comm.gloo_channel import Posts
from bapipe.torch.comm.rank_topology import gathered
from bapipe.torch.comm.worker_thread import WorkerThread, close_lanes, result_of

__all__ = ["NcclTransport", "abort_nccl", "nccl_group", "nccl_problem"]

T = TypeVar("T")

_LONG = datetime.timedelta(days=1)
"""torch's own limit, which counts from the posting of a receive and ends the process"""
_PATIENCE = 10.0
"""seconds for peers to give a communicator back, too"""
_CONNECTING = 120.0
"""seconds in which all ranks must have connected to each other"""
_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
}
"""torch's own watchdog of NCCL ends the process and names neither rank nor action; the runtime has its own. Its
warning is about several channels in one group, and here each has its own."""
_made: list[dist.ProcessGroup] = []
"""all groups of this process that are not given back"""


def nccl_group(ranks: Iterable[int], device: torch.device | None) -> dist.ProcessGroup:
    """A group of those ranks over NCCL. Collective: every rank of the default group makes it.

    They connect here, with this rank's device, or, where none is given, with their first message.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    with guarded(None):
        group: dist.ProcessGroup = dist.new_group(list(ranks), backend="nccl", timeout=_LONG, device_id=device)
    if isinstance(group, dist.ProcessGroup):  # this rank is one of them
        _made.append(group)
    return group


def abort_nccl(groups: Iterable[dist.ProcessGroup] | None = None) -> None:
    """Break off what is under way on these groups, or on all of this process.

    Kernels of NCCL wait on the GPU for peers that may be gone. While they do the device cannot be waited for, and
    on a slice the process cannot end.
    """
    for group in list(_made if groups is None else groups):
        _forget(group)
        with contextlib.suppress(RuntimeError):
            group.abort()


def _forget(group: dist.ProcessGroup) -> None:
    _made[:] = [item for item in _made if item is not group]


def _give_back(groups: Iterable[dist.ProcessGroup]) -> None:
    for group in groups:
        _forget(group)
        dist.destroy_process_group(group)


def nccl_problem(device: torch.device, *, timeout: float) -> str | None:
    """Why NCCL does not work between all ranks, found by a sum over them; None where it does. Collective.

    A connection that hangs is waited for in a thread, which is left behind.
    """
    group = nccl_group(range(dist.get_world_size()), None)
    said: list[str] = []

    def connect() -> None:
        try:
            one = torch.ones(1, device=device)
            dist.all_reduce(one, group=group)
            if float(one) != dist.get_world_size():
                said.append(f"a sum of ones over {dist.get_world_size()} ranks gave {float(one):g}")
        except RuntimeError as error:
            said.append(_reason(error))

    limit = min(timeout, _CONNECTING)
    if not _within(limit, connect):
        said.append(f"no connection within {limit:g} s; see NCCL_SOCKET_IFNAME and NCCL_DEBUG=WARN")
    found = next((text for text in gathered("".join(said)) if text), None)
    if found is None:
        _give_back([group])
    else:
        abort_nccl([group])
    return found


def _within(seconds: float, work: Callable[[], object]) -> bool:
    """Whether it was done within so many seconds; where not, its thread is left behind."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return not thread.is_alive()


def _reason(error: BaseException) -> str:
    """Of what torch says about NCCL only the reason, which is in its last line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:160]


class _NcclEnd:
    """This rank's end of a channel: its communicator, a stream and a thread."""

    def __init__(self, channel: P2PChannel, group: dist.ProcessGroup, device: torch.device) -> None:
        self._channel = channel
        self._group = group
        self._device = device
        self.copies = CopyStream(device)
        self.lane = WorkerThread(f"bapipe {channel.from_rank} to {channel.to_rank}, tag {channel.tag}")
        self._connect()

    def _connect(self) -> None:
        """NCCL makes the communicator with the first message."""
        sends = dist.get_rank() == self._channel.from_rank
        self.exchange([torch.zeros(1, dtype=torch.uint8, device=self._device)], sends=sends).synchronize()

    def exchange(
        self, values: Sequence[Tensor], *, sends: bool, after: torch.cuda.Event | None = None
    ) -> torch.cuda.Event:
        """Queue the transfer of tensors to or from the other end; the event says when it is done."""
        peer = self._channel.to_rank if sends else self._channel.from_rank
        post = dist.isend if sends else dist.irecv
        with torch.cuda.stream(self.copies.stream), guarded(peer):
            if after is not None:
                self.copies.stream.wait_event(after)
            for value in values:
                if value.numel():
                    work = post(value.view(-1).view(torch.uint8), peer, group=self._group)
                    assert work is not None, "this rank is not in the group"
                    work.wait()
            # `blocking` lets a thread that waits sleep instead of spin.
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(self.copies.stream)
        return done


class NcclTransport:
    """Messages over a NCCL communicator per channel, each announced over gloo.

    A kernel of NCCL occupies the GPU from its launch until its peer has come, and CUDA may wait for it before it
    loads another kernel: a receive posted ahead could wait for a message that this rank has still to cause. So the
    sender announces a message when it is made, by gloo, whose sends end when the receive is posted; then both ends
    launch, each from a thread, and the kernels last as long as the transfer.
    """

    name = "nccl"

    def __init__(self, channels: Iterable[P2PChannel], device: torch.device, *, timeout: float) -> None:
        """Collective: every rank of the default group gives all channels of the run, in the same order. A wait
        ends after `timeout` seconds."""
        self._timeout = timeout
        self._posts = Posts(timeout)
        self._groups: list[dist.ProcessGroup] = []
        self._ends: dict[P2PChannel, _NcclEnd] = {}
        self._failed = False
        rank = dist.get_rank()
        for channel in channels:
            ends = sorted({channel.from_rank, channel.to_rank})
            group = nccl_group(ends, device)
            if rank in ends:
                self._groups.append(group)
                self._ends[channel] = _NcclEnd(channel, group, device)
        # Threads inside gloo when the process ends would abort it.
        atexit.register(self.close)

    def _end(self, channel: P2PChannel) -> _NcclEnd:
        if channel not in self._ends:
            raise BaPipeError(
                f"{channel} is not among the channels that the transport was made with; name all of them"
            )
        return self._ends[channel]

    def receive(self, channel: P2PChannel, message: Message) -> Callable[[], tuple[Tensor, ...]]:
        end, peer = self._end(channel), channel.from_rank
        note = torch.empty(1, dtype=torch.uint8)
        noted = self._posts.receive(note, peer, channel.tag)

        def land(landed: Future[tuple[tuple[Tensor, ...], torch.cuda.Event]]) -> None:
            self._posts.wait(noted, peer)
            values = end.copies.fresh(message)
            done = end.exchange(values, sends=False)
            done.synchronize()
            landed.set_result((values, done))

        landed = end.lane.submit(land)

        def wait() -> tuple[Tensor, ...]:
            values, done = self._result(landed, peer)
            end.copies.adopt(values, done)
            return values

        return wait

    def send(self, channel: P2PChannel, values: Sequence[Tensor]) -> Callable[[], None]:
        end, peer = self._end(channel), channel.to_rank
        kept = [value.detach().contiguous() for value in values]
        made = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        made.record()

        def deliver(delivered: Future[None]) -> None:
            made.synchronize()
            note = torch.zeros(1, dtype=torch.uint8)  # kept until it is sent
            self._posts.wait(self._posts.send(note, peer, channel.tag), peer)
            end.exchange(kept, sends=True, after=made).synchronize()
            kept.clear()
            delivered.set_result(None)

        delivered = end.lane.submit(deliver)
        return lambda: self._result(delivered, peer)

    def _result(self, future: Future[T], peer: int) -> T:
        try:
            return result_of(future, peer, self._timeout)
        except LinkError:
            self._failed = True
            raise

    def close(self) -> None:
        """End the threads and give the communicators back. After a failure these are broken off: giving them back
        waits for peers that may be gone."""
        atexit.unregister(self.close)
        if self._failed:
            abort_nccl(self._groups)
        close_lanes([end.lane for end in self._ends.values()], self._posts.break_off)
        if not self._failed:
            groups = list(self._groups)
            _within(_PATIENCE, lambda: _give_back(groups))
        self._groups.clear()
        self._ends.clear()
