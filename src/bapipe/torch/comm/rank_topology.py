"""Where the ranks are: what a transport can do depends on who shares a host and who shares a GPU."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from bapipe.torch.comm.channel import guarded

__all__ = ["Place", "gathered", "place_of"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The host and the device of one rank."""

    host: str
    """the same for all ranks of one running kernel"""
    device: str
    """its type, as torch names it"""
    gpu: str | None = None
    """the identity of the GPU or of its MIG part; None on a CPU"""
    part: str = ""
    """the part of that GPU that the rank has by CUDA MPS; empty: all of it"""
    nccl_host: str = ""
    """what NCCL takes for the host, where that is set: two ranks of one GPU must differ in it"""


def place_of(device: torch.device) -> Place:
    """This rank's."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text(encoding="ascii").strip() if boot.is_file() else socket.gethostname()
    gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    return Place(
        host=host,
        device=device.type,
        gpu=gpu,
        part=os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "") if gpu else "",
        nccl_host=os.environ.get("NCCL_HOSTID", ""),
    )


def gathered(value: T) -> list[T]:
    """Every rank's value, by rank. Collective."""
    values: list[T] = [value] * dist.get_world_size()
    with guarded(None):
        dist.all_gather_object(values, value)
    return values
