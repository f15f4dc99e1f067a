"""How ranks are connected where torch's engine runs their stages: by gloo between CPUs, by NCCL between GPUs."""

from __future__ import annotations

import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist

from bapipe.errors import BaPipeError
from bapipe.torch.comm.choose_transport import Connection, connect
from bapipe.torch.comm.gloo_groups import gloo_group
from bapipe.torch.comm.nccl import nccl_group

__all__ = ["connect_torch", "pipelining_group"]


def connect_torch(transport: str, *, device: torch.device, timeout: float) -> Connection:
    """Sums over several ranks, and a transport that carries nothing: torch's engine sends itself. Collective."""
    own = "gloo" if device.type == "cpu" else "nccl"
    if transport not in ("auto", own):
        raise BaPipeError(
            f"torch's engine sends by {own} between ranks on {device.type}, got --transport {transport[:40]}; "
            "leave it out, or use --engine bapipe"
        )
    try:
        return connect(own, device=device, channels={}, timeout=timeout)
    except BaPipeError as error:
        if device.type == "cpu":
            raise
        why = str(error).partition(";")[0]
        raise BaPipeError(f"torch's engine sends by NCCL between GPUs: {why}; use --engine bapipe") from error


def pipelining_group(ranks: Sequence[int], device: torch.device, timeout: datetime.timedelta) -> dist.ProcessGroup:
    """A group of all ranks for what crosses between stages. Collective."""
    return gloo_group(ranks, timeout=timeout) if device.type == "cpu" else nccl_group(ranks, device)
