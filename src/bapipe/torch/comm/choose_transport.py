"""Which transport a run uses."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bapipe.errors import BaPipeError, nearest
from bapipe.hardware.transport_names import TRANSPORTS
from bapipe.torch.comm.channel import Message, P2PChannel, Transport
from bapipe.torch.comm.gloo import GlooTransport
from bapipe.torch.comm.gloo_groups import gloo_group
from bapipe.torch.comm.ipc import IpcTransport, ipc_problem
from bapipe.torch.comm.nccl import NcclTransport, nccl_group, nccl_problem
from bapipe.torch.comm.packing import packed_size
from bapipe.torch.comm.pair_transport import (
    Pair,
    PairTransport,
    Times,
    fastest,
    known_times,
    pair_of,
    pairs_of,
    remember,
    try_pairs,
)
from bapipe.torch.comm.rank_topology import Place, gathered, place_of
from bapipe.torch.comm.staged import StagedTransport
from bapipe.units import format_bytes, format_seconds

__all__ = ["Connection", "candidates", "connect", "make_transport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How the ranks of a run are connected."""

    transport: Transport
    """between two ranks"""
    sums: str
    """the backend of sums over several: nccl or gloo"""
    reason: str
    """what was chosen and why, in one line"""

    def sum_group(
        self, ranks: Sequence[int], device: torch.device, timeout: datetime.timedelta
    ) -> dist.ProcessGroup:
        """A process group to sum over those ranks. Collective: every rank of the default group makes it."""
        if self.sums == "nccl":
            return nccl_group(ranks, device)
        return gloo_group(ranks, timeout=timeout)


def candidates(places: Sequence[Place], *, nccl: bool) -> tuple[str, ...]:
    """Transports that can serve ranks in these places. `nccl`: torch has it.

    "nccl" is among them where no two ranks share a GPU that NCCL would take for the same, "ipc" where all ranks
    are on one host; whether network and driver allow them only a try can tell.
    """
    first = places[0].device
    other = next((rank for rank, place in enumerate(places) if place.device != first), None)
    if other is not None:
        raise BaPipeError(
            f"all ranks need the same type of device, got {first} on rank 0 and {places[other].device} on rank "
            f"{other}; run all of them on {first} or all on {places[other].device}"
        )
    if first == "cpu":
        return ("gloo",)
    if first != "cuda":
        raise BaPipeError(f"tensors are moved between CPUs or CUDA devices, got {first}; use cpu or cuda")
    apart = len({(place.nccl_host or place.host, place.gpu) for place in places}) == len(places)
    together = len({place.host for place in places}) == 1
    return (*(["nccl"] if apart and nccl else []), *(["ipc"] if together else []), "staged")


def connect(
    name: str, *, device: torch.device, channels: Mapping[P2PChannel, Message], timeout: float = 300.0
) -> Connection:
    """The transport of that name, or for "auto" the fastest that works between each two ranks.

    Collective: every rank of the default group, which has gloo, calls it with the same name, channels and timeout
    (seconds that a wait may take; "gloo" has the default group's). `channels` are all channels of the run with
    their messages, in the same order on every rank. On CPUs "auto" is gloo. On GPUs it is, for each two ranks,
    the fastest of nccl, ipc and staged that work: each is tried once with the pair's largest message, and what was
    found is kept for later runs. Sums over several ranks go by NCCL where it works, else by gloo.
    """
    if name not in TRANSPORTS:
        raise BaPipeError(
            f"a transport is one of {', '.join(TRANSPORTS)}, got {name!r}{nearest(name, TRANSPORTS)}"
        )
    ranks = gathered((place_of(device), dist.is_nccl_available()))
    places = [place for place, _ in ranks]
    possible = candidates(places, nccl=all(there for _, there in ranks))
    if name not in ("auto", *possible):
        raise BaPipeError(f"{_refusal(name, device)}; use {' or '.join(possible)}, or auto")
    if device.type == "cpu":
        return Connection(
            transport=GlooTransport(), sums="gloo", reason="tensors cross by gloo: the ranks are CPUs"
        )
    problems = _problems(name, possible, device, timeout)
    if name in problems:
        raise BaPipeError(f"{name} does not work between these ranks ({problems[name]}); use auto")
    working = [item for item in possible if item not in problems]
    wanted = working if name == "auto" else [name]
    by_pair, why = _chosen(wanted, channels, places, device, timeout)
    sums = "nccl" if "nccl" in working and name in ("auto", "nccl") else "gloo"
    failed = "".join(f"; {item} does not work: {text}" for item, text in problems.items())
    transport = PairTransport(by_pair)
    return Connection(
        transport=transport,
        sums=sums,
        reason=f"tensors cross by {transport.name or 'nothing'}, sums by {sums}{why}{failed}",
    )


def _problems(name: str, possible: Sequence[str], device: torch.device, timeout: float) -> dict[str, str]:
    """Of the transports in question those that do not work, and why. Collective."""
    asked = [item for item in ("nccl", "ipc") if item in possible and name in ("auto", item)]
    said = [nccl_problem(device, timeout=timeout) if item == "nccl" else ipc_problem(device) for item in asked]
    return {item: problem for item, problem in zip(asked, said, strict=True) if problem is not None}


def _chosen(
    names: Sequence[str],
    channels: Mapping[P2PChannel, Message],
    places: Sequence[Place],
    device: torch.device,
    timeout: float,
) -> tuple[dict[Pair, Transport], str]:
    """Each pair's transport, and what speaks for it, of a run where only these come into question."""
    pairs = pairs_of(channels)
    if len(names) == 1:
        only = _made(names[0], channels, device, timeout)
        return dict.fromkeys(pairs, only), ""
    times = known_times(names, channels, places)
    unknown = [pair for pair in pairs if pair not in times]
    made: dict[str, Transport] = {}
    if unknown:
        asked = {channel: message for channel, message in channels.items() if pair_of(channel) in unknown}
        tried = [_made(item, asked, device, timeout) for item in names]
        found = try_pairs(tried, asked, unknown, device)
        remember(found, channels, places)
        times.update(found)
        if len(unknown) == len(pairs):
            made = {item.name: item for item in tried}
        else:
            for transport in tried:
                transport.close()
    winners = {pair: fastest(times[pair]) for pair in pairs}
    for item in names:
        served = {channel: message for channel, message in channels.items() if winners[pair_of(channel)] == item}
        if not served and item in made:
            made.pop(item).close()
        elif served and item not in made:
            made[item] = _made(item, served, device, timeout)
    return {pair: made[winners[pair]] for pair in pairs}, _why(times, channels, measured=bool(unknown))


def _made(name: str, channels: Mapping[P2PChannel, Message], device: torch.device, timeout: float) -> Transport:
    if name == "nccl":
        return NcclTransport(channels, device, timeout=timeout)
    return (IpcTransport if name == "ipc" else StagedTransport)(device, timeout=timeout)


def _why(times: Mapping[Pair, Times], channels: Mapping[P2PChannel, Message], *, measured: bool) -> str:
    """The times of the first pair, as an example."""
    if not times:
        return ""
    pair = min(times)
    size = max(packed_size(message) for channel, message in channels.items() if pair_of(channel) == pair)
    listed = ", ".join(
        f"{name} {format_seconds(value)}" for name, value in sorted(times[pair].items(), key=lambda item: item[1])
    )
    when = "" if measured else " in an earlier run"
    return f" ({format_bytes(size)} from rank {pair[0]} to {pair[1]}{when}: {listed})"


def make_transport(
    name: str,
    *,
    device: torch.device,
    channels: Mapping[P2PChannel, Message] | None = None,
    timeout: float = 300.0,
) -> Transport:
    """The transport of `connect` alone."""
    return connect(name, device=device, channels=channels or {}, timeout=timeout).transport


def _refusal(name: str, device: torch.device) -> str:
    if device.type == "cpu":
        return f"the {name} transport moves CUDA tensors, and the ranks are on CPUs"
    return {
        "gloo": "gloo cannot read a GPU's memory",
        "ipc": "the ipc transport needs all ranks on one host",
        "nccl": "nccl needs a torch that has it, and for every rank a GPU, or a slice of one, to itself",
    }[name]
