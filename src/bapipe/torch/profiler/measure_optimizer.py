"""Measure the optimizer step of each layer that has weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from bapipe.torch.profiler.layer_clock import CudaClock, HostClock
from bapipe.torch.profiler.layer_memory import is_out_of_memory
from bapipe.torch.profiler.layer_runner import LayerSequence
from bapipe.torch.profiler.measure_state import MeasureState, dtype_of, free_memory, warmup_of
from bapipe.torch.profiler.measurement import Measurement, OptimizerTiming
from bapipe.torch.profiler.optimizer_step import time_optimizer, weigh_optimizer

__all__ = ["measure_optimizer"]

_OPTIMIZER_TOO_LARGE = "the optimizer step does not fit and counts as nothing"


def measure_optimizer(
    chain: LayerSequence, state: MeasureState, clock: CudaClock | HostClock, round_: int
) -> None:
    """The step of each layer that has weights, one of a kind, and of a single number; and what one keeps."""
    measured = state.measured
    done = {item.layer for item in measured.optimizer_steps if item.round == round_}
    layers = [index for index in _one_of_a_kind(measured) if measured.layers[index].steps_weights]
    if not layers or {None, *layers} <= done or _OPTIMIZER_TOO_LARGE in measured.notes:
        return
    try:
        if None not in done:
            single = [nn.Parameter(torch.zeros(1, device=chain.device, dtype=dtype_of(chain)))]
            _time_optimizer(chain, state, clock, round_, None, single)
        for index in layers:
            parameters = state.piece(chain, index, index).parameters
            if index not in done and parameters:
                _time_optimizer(chain, state, clock, round_, index, parameters)
        if state.measured.optimizer_bytes is None:
            all_ = {id(item): item for index in layers for item in state.piece(chain, index, index).parameters}
            weighed = weigh_optimizer(measured.optimizer, list(all_.values()))
            state.measured = replace(state.measured, optimizer_bytes=weighed)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        state.measured = replace(state.measured, notes=(*state.measured.notes, _OPTIMIZER_TOO_LARGE))
    state.advance("optimizer step", 0.5)
    free_memory(chain)


def _one_of_a_kind(measured: Measurement) -> list[int]:
    """The measured layers without those that repeat an earlier one."""
    if measured.repeats is None:
        return list(range(len(measured.layers)))
    return sorted({alike[0] for alike in measured.repeats.timed_as})


def _time_optimizer(
    chain: LayerSequence,
    state: MeasureState,
    clock: CudaClock | HostClock,
    round_: int,
    layer: int | None,
    parameters: Sequence[nn.Parameter],
) -> None:
    reading = time_optimizer(
        state.measured.optimizer,
        parameters,
        clock=clock,
        stopping=state.settings.stopping(round_),
        warmup=warmup_of(chain),
        mixed=chain.mixed,
    )
    if reading is not None:
        timing = OptimizerTiming(layer=layer, round=round_, reading=reading)
        state.measured = replace(state.measured, optimizer_steps=(*state.measured.optimizer_steps, timing))
