"""Which transport a run uses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from bapipe.errors import BaPipeError, nearest
from bapipe.torch.comm.channel import P2PChannel, Transport
from bapipe.torch.comm.gloo import GlooTransport
from bapipe.torch.comm.ipc import IpcTransport, ipc_problem
from bapipe.torch.comm.nccl import NcclTransport
from bapipe.torch.comm.rank_topology import Place, gathered, place_of
from bapipe.torch.comm.staged import StagedTransport

__all__ = ["TRANSPORTS", "candidates", "make_transport"]

TRANSPORTS = ("auto", "gloo", "staged", "ipc", "nccl")


def candidates(places: Sequence[Place], *, nccl: bool) -> tuple[str, ...]:
    """Transports that can serve ranks in these places, fastest first. `nccl`: it is there to be used.

    "ipc" is among them where all ranks are on one host; whether the driver allows it only a try can tell.
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
    apart = len({(place.host, place.gpu) for place in places}) == len(places)
    together = len({place.host for place in places}) == 1
    return (*(["nccl"] if apart and nccl else []), *(["ipc"] if together else []), "staged")


def make_transport(
    name: str, *, device: torch.device, channels: Sequence[P2PChannel] = (), timeout: float = 300.0
) -> Transport:
    """The transport of that name, or for "auto" the fastest that works here.

    Collective: every rank of the default group, which is gloo's, calls it with the same name and timeout (seconds
    that a wait may take; "gloo" has the default group's). `channels` are all channels of the run, in the same
    order on every rank; "nccl" connects them here, the others need none. On CPUs "auto" is gloo. On GPUs it is
    nccl where every rank has a GPU of its own and channels are given, else ipc where all ranks are on one host
    and can map each other's memory, else staged.
    """
    if name not in TRANSPORTS:
        raise BaPipeError(
            f"a transport is one of {', '.join(TRANSPORTS)}, got {name!r}{nearest(name, TRANSPORTS)}"
        )
    places = gathered(place_of(device))
    possible = candidates(places, nccl=dist.is_nccl_available() and bool(channels))
    if name not in ("auto", *possible):
        raise BaPipeError(f"{_refusal(name, device)}; use {' or '.join(possible)}, or auto")
    chosen = possible[0] if name == "auto" else name
    if chosen == "ipc":
        problem = ipc_problem(device)
        if problem is not None and name == "ipc":
            raise BaPipeError(f"ranks cannot map each other's GPU memory ({problem}); use staged, or auto")
        chosen = "ipc" if problem is None else "staged"
    if chosen == "gloo":
        return GlooTransport()
    if chosen == "nccl":
        return NcclTransport(channels, device, timeout=timeout)
    return (IpcTransport if chosen == "ipc" else StagedTransport)(device, timeout=timeout)


def _refusal(name: str, device: torch.device) -> str:
    if device.type == "cpu":
        return f"the {name} transport moves CUDA tensors, and the ranks are on CPUs"
    return {
        "gloo": "gloo cannot read a GPU's memory",
        "ipc": "the ipc transport needs all ranks on one host",
        "nccl": "nccl needs a torch that has it, the channels to connect, and a GPU for every rank",
    }[name]
