"""Measure at one size: each unit, each layer in parts, and the whole step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from bapipe.torch.profiler.layer_clock import CudaClock, HostClock
from bapipe.torch.profiler.layer_memory import is_out_of_memory
from bapipe.torch.profiler.layer_runner import LayerSequence
from bapipe.torch.profiler.layer_timing import Walk, inputs_of, time_piece
from bapipe.torch.profiler.measure_state import MeasureState, free_memory, layer_failure, warmup_of
from bapipe.torch.profiler.measurement import UnitTiming
from bapipe.torch.profiler.part_timing import time_parts
from bapipe.torch.profiler.whole_step import steps_left, time_whole

__all__ = ["is_long", "measure_whole", "time_units", "whole_steps_left"]

_LONG = 0.02
"""seconds of backward from which on the second round neither warms up nor takes the gradients apart again"""
_LONG_STEP = 0.5
"""seconds of a whole step from which on it is a long one"""
_WHOLE_SECONDS = 0.3
"""to spend on a whole step each time on a GPU: where the host limits it, it varies by a tenth and more"""


def time_units(
    chain: LayerSequence,
    state: MeasureState,
    clock: CudaClock | HostClock,
    size: int,
    round_: int,
    units: Sequence[tuple[int, int] | int],
    *,
    whole: bool,
) -> None:
    """Each unit, and each layer in parts, in random order; `whole`: and the whole step halfway through."""
    if not units:
        return
    values = state.walk(chain, size)
    order = list(units)
    random.Random(f"{state.settings.seed}/{round_}/{size}").shuffle(order)
    for count, unit in enumerate(order):
        if whole and count == len(order) // 2:
            measure_whole(chain, state, size, round_)
        if isinstance(unit, int):
            _time_parts(chain, state, clock, values, size, round_, unit)
            continue
        first, last = unit
        piece = state.piece(chain, first, last)
        before = state.measured.rounds(size, first)
        long = any(item.backward.host.median > _LONG for item in before)
        warm = (first, size) in state.warm
        state.warm.add((first, size))
        times = time_piece(
            piece,
            inputs_of(piece, values, chain.device),
            clock=clock,
            stopping=state.settings.stopping(round_),
            warmup=0 if long or (warm and chain.device.type == "cpu") else warmup_of(chain),
            apart=not long or state.settings.iterations is not None,
        )
        timing = UnitTiming(
            first=first,
            last=last,
            microbatch=size,
            round=round_,
            forward=times.forward,
            backward=times.backward,
            input_gradient=times.input_gradient,
            weight_gradient=times.weight_gradient,
            delayed=times.delayed,
        )
        others = [
            item
            for item in state.measured.timings
            if (item.first, item.microbatch, item.round) != (first, size, round_)
        ]
        state.measured = replace(state.measured, timings=(*others, timing))
        state.advance(f"{size}: {chain.layers[first].name}", float(size))


def _time_parts(
    chain: LayerSequence,
    state: MeasureState,
    clock: CudaClock | HostClock,
    values: Walk,
    size: int,
    round_: int,
    layer: int,
) -> None:
    """The layer in two parts; where these do not fit, no layer is tried so at that size or a larger one."""
    measured = state.measured
    if measured.parts_not_fitting and size >= min(measured.parts_not_fitting):
        state.advance(f"{size}: parts do not fit", float(size))
        return
    before = measured.part_rounds(size, layer)
    long = any(item.backward[1].host.median > _LONG for item in before)
    try:
        timing = time_parts(
            chain,
            layer,
            values,
            size=size,
            round_=round_,
            clock=clock,
            stopping=state.settings.stopping(round_),
            warmup=0 if long else warmup_of(chain),
            whole=(layer, layer) not in measured.units,
            weigh=all(item.saved_activations is None for item in before if item.round != round_),
        )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        state.measured = measured.without_parts(size)
        free_memory(chain)
    else:
        state.measured = measured.with_parts(timing)
    state.advance(f"{size}: {chain.layers[layer].name} in parts", float(size))


def measure_whole(chain: LayerSequence, state: MeasureState, size: int, round_: int) -> None:
    try:
        stopping = replace(state.settings.stopping(round_), minimum=1)
        warmup = 0
        if chain.device.type != "cpu":
            stopping = replace(stopping, minimum=3, seconds=max(stopping.seconds, _WHOLE_SECONDS))
            warmup = warmup_of(chain)
        units = [state.piece(chain, first, last) for first, last in state.measured.units]
        step = time_whole(chain, size, units=units, round_=round_, stopping=stopping, warmup=warmup)
        state.measured = replace(state.measured, whole=(*state.measured.whole, step))
    except Exception as error:
        if not is_out_of_memory(error):
            raise layer_failure(state.measured.model, size, error) from error
        notes = dict.fromkeys((*state.measured.notes, _too_large(size)))
        state.measured = replace(state.measured, notes=tuple(notes))


def is_long(state: MeasureState, size: int) -> bool:
    known = state.measured.step(size)
    return (known.median if known else state.step * size) >= _LONG_STEP


def whole_steps_left(state: MeasureState, size: int, round_: int) -> int:
    """How often the whole step is still to be timed in this round."""
    if _too_large(size) in state.measured.notes:
        return 0
    found = [(item.round, item.eager.median) for item in state.measured.whole if item.microbatch == size]
    return steps_left(found, round_, long=is_long(state, size))


def _too_large(size: int) -> str:
    return f"the whole step does not fit at {size}"
