"""What FSDP2 takes on CPUs to gather and to scatter a unit: its own work on the host, and what is sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

__all__ = ["unit_seconds"]

_UNITS = 4
"""of a model whose units are timed; the first and the last are not like the others"""
_PIECES = 12
"""parameters of a unit, about as many as a block of a transformer has"""
_LEAST = 1e-9
"""seconds; on a busy machine a difference may come out below 0"""

Repeat = Callable[[Callable[[], None]], Sequence[float]]
"""runs something again and again on all ranks, warm-ups first, and returns its times"""


class _Unit(nn.Module):
    """Parameters of so many bytes, of which hardly anything is computed."""

    def __init__(self, nbytes: int, ranks: int) -> None:
        super().__init__()
        each = -(-nbytes // (torch.float32.itemsize * _PIECES * ranks)) * ranks
        self.own = nn.ParameterList(nn.Parameter(torch.zeros(each)) for _ in range(_PIECES))

    def forward(self, value: Tensor) -> Tensor:
        for weight in self.own:
            value = value + weight[:1]
        return value


class _Model(nn.Module):
    def __init__(self, nbytes: int, ranks: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(_Unit(nbytes, ranks) for _ in range(_UNITS))

    def forward(self, value: Tensor) -> Tensor:
        for unit in self.units:
            value = unit(value)
        return value.sum()


def unit_seconds(
    nbytes: int, group: dist.ProcessGroup, repeat: Repeat
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Samples of what it takes longer to train a unit of so many bytes because FSDP2 shards it over the group.

    Of a gather, as the forward has one, and of a scatter, as the backward has one after a gather.
    """
    ranks = dist.get_world_size(group)
    plain = _timed(_Model(nbytes, ranks), repeat)
    sharded = _Model(nbytes, ranks)
    mesh = DeviceMesh.from_group(group, "cpu")
    for unit in sharded.units:
        fully_shard(unit, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    forward, backward = _timed(sharded, repeat)
    base = [median(times) for times in plain]
    gathers = [max(_LEAST, (seconds - base[0]) / _UNITS) for seconds in forward]
    gather = median(gathers)
    scatters = [max(_LEAST, (seconds - base[1]) / _UNITS - gather) for seconds in backward]
    return tuple(gathers), tuple(scatters)


def _timed(model: nn.Module, repeat: Repeat) -> tuple[list[float], list[float]]:
    """Seconds of the forwards and of the backwards."""
    forwards: list[float] = []

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        begun = time.perf_counter()
        loss: Any = model(torch.ones(1))
        forwards.append(time.perf_counter() - begun)
        loss.backward()

    whole = repeat(step)
    ahead = forwards[-len(whole) :]
    return ahead, [seconds - first for seconds, first in zip(whole, ahead, strict=True)]
