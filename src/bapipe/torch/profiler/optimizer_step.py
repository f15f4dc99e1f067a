"""The optimizer step: what it takes for each layer, what it keeps, and its temporary tensors."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bapipe.torch.capturing.torch_internals import temporary_bytes
from bapipe.torch.inputs.make_optimizer import make_optimizer
from bapipe.torch.profiler.layer_clock import Clock
from bapipe.torch.profiler.measurement import OptimizerBytes, Reading
from bapipe.torch.profiler.mixed_layers import MixedLayers
from bapipe.torch.profiler.statistics import Stopping, summarise
from bapipe.torch.profiler.whole_step import make_gradients

__all__ = ["time_optimizer", "weigh_optimizer"]


def time_optimizer(
    name: str,
    parameters: Sequence[nn.Parameter],
    *,
    clock: Clock,
    stopping: Stopping,
    warmup: int,
    mixed: MixedLayers | None = None,
) -> Reading | None:
    """A step over the parameters, at rate 0 so that nothing changes; None where none is trained.

    In mixed precision with their casts, of which there is also one for each global batch.
    """
    make_gradients(parameters)
    optimizer = make_optimizer(name, list(parameters), rate=0.0)
    if optimizer is None:
        return None

    def step() -> None:
        optimizer.step()
        if mixed is not None:
            mixed.cast(parameters)

    for _ in range(warmup):
        step()
    hosts: list[float] = []
    devices: list[float] = []
    begun = time.perf_counter()
    while not stopping.done(hosts, spent=time.perf_counter() - begun):
        clock.begin()
        clock.mark()
        step()
        clock.mark()
        laps = clock.read()
        if laps is None:
            continue
        hosts.append(laps[0].host)
        if laps[0].device is not None:
            devices.append(laps[0].device)
    return Reading(host=summarise(hosts), device=summarise(devices) if len(devices) == len(hosts) else None)


def weigh_optimizer(name: str, parameters: Sequence[nn.Parameter]) -> OptimizerBytes | None:
    """What the optimizer keeps after its first step, and what the next one has in temporary tensors."""
    make_gradients(parameters)
    optimizer = make_optimizer(name, list(parameters), rate=0.0)
    if optimizer is None:
        return None
    optimizer.step()
    trained = [item for group in optimizer.param_groups for item in group["params"]]
    kept = sum(
        value.nbytes for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)
    )
    device = trained[0].device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        optimizer.step()
        torch.cuda.synchronize(device)
        workspace = float(torch.cuda.max_memory_allocated(device) - before)
    else:
        workspace = float(temporary_bytes(optimizer.step))
    return OptimizerBytes(parameters=sum(item.numel() for item in trained), state=float(kept), workspace=workspace)
