"""Ranks that agree: on a sum, and on what time it is."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.torch.comm import guarded

__all__ = ["clock_offset", "gathered", "machine_name", "max_over_ranks", "sum_over_ranks"]

T = TypeVar("T")
_ROUNDS = 16


def sum_over_ranks(value: float) -> float:
    """The sum of every rank's value, once all ranks are here."""
    total = torch.tensor(value, dtype=torch.float64)
    with guarded(None):
        dist.all_reduce(total)
    return float(total)


def max_over_ranks(value: float) -> float:
    """The largest of every rank's value, once all ranks are here."""
    largest = torch.tensor(value, dtype=torch.float64)
    with guarded(None):
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def gathered(value: T) -> list[T]:
    """Every rank's value on rank 0; elsewhere an empty list."""
    values: list[T] | None = [value] * dist.get_world_size() if dist.get_rank() == 0 else None
    with guarded(None):
        dist.gather_object(value, values)
    return values or []


def machine_name() -> str:
    """The same on all ranks that share a clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def clock_offset(machine: str, *, clock: Callable[[], float] = time.perf_counter) -> float:
    """How far this rank's clock is ahead of rank 0's; every rank calls it at once.

    Ranks of one machine share its clock, so theirs is 0 and exact. To the others rank 0 sends its question
    several times; the quickest answer is off by at most half of its round trip.
    """
    machines: list[str] = [""] * dist.get_world_size()
    with guarded(None):
        dist.all_gather_object(machines, machine)
    rank = dist.get_rank()
    reading, offset = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for peer in range(1, dist.get_world_size()):
        if machines[peer] == machines[0] or rank not in (0, peer):
            continue
        if rank == 0:
            offset[0] = min(_ask(peer, reading, clock) for _ in range(_ROUNDS))[1]
            dist.send(offset, peer)
        else:
            for _ in range(_ROUNDS):
                dist.recv(reading, 0)
                reading[0] = clock()
                dist.send(reading, 0)
            dist.recv(offset, 0)
    return float(offset) if rank else 0.0


def _ask(peer: int, reading: Tensor, clock: Callable[[], float]) -> tuple[float, float]:
    """(round trip, how far the peer's clock is ahead)."""
    asked = clock()
    dist.send(reading, peer)
    dist.recv(reading, peer)
    answered = clock()
    return answered - asked, float(reading) - (asked + answered) / 2
