"""The whole model at once: what the sum of layers is held against, and the optimizer's step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bapipe.torch.build import make_optimizer
from bapipe.torch.measure.chain import Chain, tensors_of
from bapipe.torch.measure.clock import Clock, HostClock
from bapipe.torch.measure.memory import storage_of
from bapipe.torch.measure.record import Reading, WholeStep
from bapipe.torch.measure.statistics import Stopping, Summary, summarise

__all__ = ["time_update", "time_whole"]

_LONG = 0.5
"""seconds of a step from which on the first counts, though nothing warmed it up"""


def time_whole(chain: Chain, size: int, *, round_: int, stopping: Stopping, warmup: int) -> WholeStep:
    """Forward and backward of the whole model from idle to idle, as the module itself and (GPU) as one stage.

    The gradients are there and are added to. On a GPU the allocator's peak of the eager step is taken too.
    """
    leaves, call = chain.inputs(size)
    device = chain.device
    _make_gradients(chain)
    eager = _time(lambda: tensors_of(call(leaves)), device, stopping, warmup)
    peak = idle = None
    one: Summary | None = None
    if device.type == "cuda":
        peak, idle = _peak(chain, lambda: tensors_of(call(leaves)), leaves)
        piece = chain.piece(0, len(chain.layers) - 1)
        roots = [leaves[index] for index in piece.roots]
        one = _time(lambda: tensors_of(piece.run(*roots)), device, stopping, warmup)
    return WholeStep(microbatch=size, round=round_, chain=one or eager, eager=eager, peak=peak, idle=idle)


def _make_gradients(chain: Chain) -> None:
    for parameter in chain.module.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _time(forward: Callable[[], list[Tensor]], device: torch.device, stopping: Stopping, warmup: int) -> Summary:
    errors: list[Tensor] = []
    samples: list[float] = []
    clock = HostClock()
    for _ in range(warmup):
        _step(forward, errors)
    cold = warmup == 0
    begun = time.perf_counter()
    while not stopping.done(samples, spent=time.perf_counter() - begun):
        _idle(device)
        clock.begin()
        clock.mark()
        _step(forward, errors)
        _idle(device)
        clock.mark()
        taken = clock.read()[0].host
        if not cold or taken >= _LONG:
            samples.append(taken)
        cold = False
    return summarise(samples)


def _step(forward: Callable[[], list[Tensor]], errors: list[Tensor]) -> None:
    outputs = [value for value in forward() if value.requires_grad]
    if not errors:
        errors.extend(torch.randn_like(value) / max(1, value.numel()) ** 0.5 for value in outputs)
    if outputs:
        torch.autograd.backward(outputs, errors)


def _idle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(chain: Chain, forward: Callable[[], list[Tensor]], leaves: Sequence[Any]) -> tuple[float, float]:
    """(peak, idle): bytes at most during one step; of these what neither state, gradients nor inputs explain."""
    device = chain.device
    _idle(device)
    gradients = [item.grad for item in chain.module.parameters() if item.grad is not None]
    known = dict(storage_of(tensor) for tensor in (*chain.state(), *gradients, *tensors_of(list(leaves))))
    idle = torch.cuda.memory_allocated(device) - sum(known.values())
    torch.cuda.reset_peak_memory_stats(device)
    outputs = [value for value in forward() if value.requires_grad]
    torch.autograd.backward(outputs, [torch.ones_like(value) for value in outputs])
    _idle(device)
    return float(torch.cuda.max_memory_allocated(device)), float(idle)


def time_update(chain: Chain, optimizer: str, *, clock: Clock, stopping: Stopping, warmup: int) -> Reading | None:
    """The optimizer's step over all parameters, at rate 0 so that nothing changes; None without parameters."""
    _make_gradients(chain)
    made = make_optimizer(optimizer, chain.module, rate=0.0)
    if made is None:
        return None
    for _ in range(warmup):
        made.step()
    hosts: list[float] = []
    devices: list[float] = []
    begun = time.perf_counter()
    while not stopping.done(hosts, spent=time.perf_counter() - begun):
        clock.begin()
        clock.mark()
        made.step()
        clock.mark()
        laps = clock.read()
        if laps is None:
            continue
        hosts.append(laps[0].host)
        if laps[0].device is not None:
            devices.append(laps[0].device)
    return Reading(host=summarise(hosts), device=summarise(devices) if len(devices) == len(hosts) else None)
