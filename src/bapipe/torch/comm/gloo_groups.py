"""Process groups over gloo, which in a local run nobody but its own ranks can join.

gloo's ranks listen on a port each and take whoever connects for the rank that they expect. On one machine every
user can connect. So the ranks of a local run (`bapipe.io.run_folder`)

1. meet at a store that is a file in a folder of their user's alone, not at a port;
2. open their ports only once all of them are there, so that a port takes connections for milliseconds;
3. show each other, before anything else is sent, a token that only those who read that folder can make;
4. then have the system drop whatever else comes to the ports (`close_ports`, on Linux).

Without a launcher of BaPipe a group is torch's own, and whoever reaches the ports must be trusted.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import logging
import os
import socket
import struct
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from bapipe.io.run_folder import found_folder, pair_token, store_file
from bapipe.torch.comm.channel import LinkError, guarded
from bapipe.torch.comm.intruders import IntruderError, foreign_peers

__all__ = ["close_ports", "gloo_group", "listening", "meet"]

_logger = logging.getLogger(__name__)
_ATTACH_FILTER = 26
"""SO_ATTACH_FILTER, which Python does not name"""
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)
"""a filter of one instruction: return 0, keep nothing of the packet"""
_TOKEN_TAG = 0
_FOREIGN = datetime.timedelta(seconds=10)
"""how long a token is waited for where somebody else has connected, too"""
_PAUSE = 0.01
"""seconds between two looks whether all ranks are there"""


def meet(folder: Path, rank: int, ranks: int, timeout: datetime.timedelta) -> None:
    """Make the default process group of a local run, whose folder this is, over gloo. Collective."""
    store = dist.FileStore(str(store_file(folder)), ranks)  # type: ignore[attr-defined]
    store.set_timeout(timeout)
    end = time.monotonic() + timeout.total_seconds()
    there = store.add("bapipe/there", 1)
    while there < ranks:
        if time.monotonic() > end:
            raise LinkError(None, TimeoutError(f"timed out after {timeout.total_seconds():g} s"))
        time.sleep(_PAUSE)
        there = store.add("bapipe/there", 0)
    before = listening()
    with guarded(None):
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    world = dist.group.WORLD
    assert world is not None, "the group was just made"
    _secure(folder, world, before, timeout)


def gloo_group(ranks: Sequence[int] | None = None, *, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """A process group of these ranks, or of all. Collective: every rank of the default group makes it.

    In a local run it costs a few milliseconds and a message from every rank to every other.
    """
    folder = found_folder()
    wanted = None if ranks is None else list(ranks)
    if folder is None:
        with guarded(None):
            group: dist.ProcessGroup = dist.new_group(wanted, backend="gloo", timeout=timeout)
        return group
    with guarded(None):
        dist.all_reduce(torch.zeros(1))  # all are there
        before = listening()
        group = dist.new_group(wanted, backend="gloo", timeout=timeout)
    if isinstance(group, dist.ProcessGroup):  # this rank is one of them
        _secure(folder, group, before, timeout)
    return group


def _secure(
    folder: Path, group: dist.ProcessGroup, before: Mapping[int, int], timeout: datetime.timedelta
) -> None:
    """See that every connection of a new group is to its rank, and that no other can be made."""
    opened = {number: port for number, port in listening().items() if number not in before}
    close_ports(opened)
    # Who has come to a port before it was closed may be taken for a rank, and may say nothing.
    foreign = foreign_peers(set(opened.values()))
    own, members, name = dist.get_rank(), dist.get_process_group_ranks(group), group.group_name
    others = [(place, rank) for place, rank in enumerate(members) if rank != own]
    shown = {rank: _tensor(pair_token(folder, name, own, rank)) for _, rank in others}
    seen = {rank: torch.zeros_like(shown[rank]) for _, rank in others}
    works = []
    try:
        with guarded(None):
            for place, rank in others:
                works.append((rank, group.recv([seen[rank]], place, _TOKEN_TAG)))
                works.append((rank, group.send([shown[rank]], place, _TOKEN_TAG)))
        for rank, work in works:
            with guarded(rank):
                work.wait(min(timeout, _FOREIGN) if foreign else timeout)
    except LinkError as error:
        if foreign:
            raise IntruderError(f"a process of user {foreign[0]}") from error
        raise
    for _, rank in others:
        if bytes(seen[rank].tolist()) != pair_token(folder, name, rank, own):
            raise IntruderError(f"a process that is not rank {rank}")


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def listening() -> dict[int, int]:
    """Descriptor -> port at which this process listens for connections over IP; none where there is no /proc."""
    found = {}
    folder = Path("/proc/self/fd")
    for name in os.listdir(folder) if folder.is_dir() else ():
        try:
            with _copied(int(name)) as own:
                over_ip = own.family in (socket.AF_INET, socket.AF_INET6)
                if over_ip and own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    found[int(name)] = own.getsockname()[1]
        except OSError:
            continue  # no socket, or closed meanwhile
    return found


@contextlib.contextmanager
def _copied(number: int) -> Iterator[socket.socket]:
    """The socket of a descriptor, by a copy of it that is closed afterwards; an OSError where it is none."""
    copy = os.dup(number)
    try:
        own = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)  # a socket that cannot be made leaves it open
        raise
    with own:
        yield own


def close_ports(descriptors: Iterable[int]) -> None:
    """Have the system drop all that comes to these listening sockets; connections that they have made stay.

    gloo ends the process when a listening socket of its own is closed or shut down. A filter it does not notice.
    Where the system has no such filters, as some sandboxes, ports stay open and the tokens alone keep others out.
    """
    if sys.platform != "linux":
        return
    program = ctypes.create_string_buffer(_DROP)
    given = struct.pack("HxxxxxxP", 1, ctypes.addressof(program))
    for number in descriptors:
        with _copied(number) as own:
            try:
                own.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, given)
            except OSError as error:
                _logger.info("the ports of this run stay open on loopback: %s", error)
                return
