"""CUDA tensors over NCCL, for ranks that each have a GPU, or a slice of one, to themselves.

NCCL matches the sends and receives of two ranks by their order alone and runs them one after another, so each
channel has a communicator of its own: receives are posted ahead on every channel, and nothing would order them
between channels. They are made in the constructor, in the same order on every rank, because making one waits for
both ranks.

NCCL refuses two ranks on one GPU, which it tells apart by host and bus id. Ranks on slices of one GPU have another
NCCL_HOSTID each, so that every slice is a host of its own, and talk through sockets. Separate GPUs must not have
one: it would turn NVLink and shared memory off.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.errors import BaPipeError
from bapipe.torch.comm.channel import LinkError, Message, P2PChannel, guarded
from bapipe.torch.comm.packing import message_of
from bapipe.torch.comm.rank_topology import gathered

__all__ = ["NcclTransport", "abort_nccl", "nccl_group", "nccl_problem"]

_LONG = datetime.timedelta(days=1)
"""torch's own limit, which counts from the posting of a receive and ends the process"""
_NAP = 5e-5
"""seconds between two looks"""
_PATIENCE = 10.0
"""seconds for peers to give a communicator back, too"""
_CONNECTING = 120.0
"""seconds in which all ranks must have connected to each other"""
_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
"""torch's own watchdog of NCCL ends the process and names neither rank nor action; the runtime has its own"""
_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
_made: list[dist.ProcessGroup] = []
"""all groups of this process that are not given back"""


def nccl_group(ranks: Iterable[int], *, host_waits: bool = False) -> dist.ProcessGroup:
    """A group of those ranks over NCCL. Collective: every rank of the default group makes it.

    A wait for its works lets the current stream wait, unless the host is to: only such a wait raises where NCCL has
    failed.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    with guarded(None), _blocking(host_waits):
        group: dist.ProcessGroup = dist.new_group(list(ranks), backend="nccl", timeout=_LONG)
    if isinstance(group, dist.ProcessGroup):  # this rank is one of them
        _made.append(group)
    return group


@contextlib.contextmanager
def _blocking(host_waits: bool) -> Iterator[None]:
    """Groups that are made within have it so: torch offers nothing but the environment to say it."""
    before = os.environ.get(_BLOCKING)
    os.environ[_BLOCKING] = "1" if host_waits else "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_BLOCKING]
        else:
            os.environ[_BLOCKING] = before


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


def _give_back(group: dist.ProcessGroup) -> None:
    _forget(group)
    dist.destroy_process_group(group)


def nccl_problem(device: torch.device, *, timeout: float) -> str | None:
    """Why NCCL does not work between all ranks, found by a sum over them; None where it does. Collective.

    A connection that hangs is waited for in a thread, which is left behind.
    """
    group = nccl_group(range(dist.get_world_size()))
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
        _give_back(group)
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


class NcclTransport:
    """`isend` and `irecv` of bytes on a NCCL group per channel.

    A wait looks until NCCL is done, on the host, so that it can end after `timeout` seconds: NCCL does not notice
    every peer that dies.
    """

    name = "nccl"

    def __init__(self, channels: Iterable[P2PChannel], device: torch.device, *, timeout: float) -> None:
        """Collective: every rank of the default group gives all channels of the run, in the same order."""
        self._device = device
        self._timeout = timeout
        self._lost: dict[int, LinkError] = {}
        """peers that did not answer: nothing that comes from them counts any more"""
        self._groups: dict[P2PChannel, dist.ProcessGroup] = {}
        rank = dist.get_rank()
        for channel in channels:
            ends = sorted({channel.from_rank, channel.to_rank})
            group = nccl_group(ends, host_waits=True)
            if rank in ends:
                assert isinstance(group, dist.ProcessGroup)
                self._groups[channel] = group
                self._connect(channel)

    def _connect(self, channel: P2PChannel) -> None:
        """NCCL makes the communicator with the first message."""
        nothing = torch.zeros(1, dtype=torch.uint8, device=self._device)
        if dist.get_rank() == channel.from_rank:
            self.send(channel, [nothing])()
        else:
            self.receive(channel, message_of([nothing]))()

    def receive(self, channel: P2PChannel, message: Message) -> Callable[[], tuple[Tensor, ...]]:
        buffers = tuple(about.empty(self._device) for about in message)
        works = self._post(dist.irecv, channel, channel.from_rank, buffers)

        def wait() -> tuple[Tensor, ...]:
            self._wait(works, channel.from_rank)
            return buffers

        return wait

    def send(self, channel: P2PChannel, values: Sequence[Tensor]) -> Callable[[], None]:
        kept = [value.detach().contiguous() for value in values]
        works = self._post(dist.isend, channel, channel.to_rank, kept)

        def wait() -> None:
            self._wait(works, channel.to_rank)
            kept.clear()

        return wait

    def _post(
        self, post: Callable[..., dist.Work | None], channel: P2PChannel, peer: int, values: Sequence[Tensor]
    ) -> list[dist.Work]:
        if channel not in self._groups:
            raise BaPipeError(
                f"{channel} is not among the channels that the transport was made with; name all of them"
            )
        works: list[dist.Work] = []
        if peer in self._lost:
            return works
        with guarded(peer):
            for value in values:
                if value.numel():
                    work = post(value.view(-1).view(torch.uint8), peer, group=self._groups[channel])
                    assert work is not None, "this rank is not in the group"
                    works.append(work)
        return works

    def _wait(self, works: Sequence[dist.Work], peer: int) -> None:
        """Until NCCL is done; then the current stream may use what came."""
        end = time.monotonic() + self._timeout
        try:
            for work in works:
                while not work.is_completed():
                    if time.monotonic() > end:
                        raise TimeoutError(f"timed out after {self._timeout:g} s")
                    time.sleep(_NAP)
                work.wait()
        except (RuntimeError, TimeoutError) as error:
            self._lost.setdefault(peer, LinkError(peer, error))
        if peer in self._lost:
            raise self._lost[peer]

    def close(self) -> None:
        """Give the communicators back. After a failure they are broken off: giving them back waits for peers that
        may be gone."""
        if self._lost:
            abort_nccl(self._groups.values())
        else:
            _within(_PATIENCE, lambda: [_give_back(group) for group in self._groups.values()])
        self._groups.clear()
