"""The measuring itself: rounds over sizes and layers in random order, kept as it goes, resumed where it ended."""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from bapipe.errors import BaPipeError
from bapipe.torch.profiler.grouping import find_units
from bapipe.torch.profiler.launch_overhead import empty_issue
from bapipe.torch.profiler.layer_clock import CudaClock, HostClock, clock_of
from bapipe.torch.profiler.layer_memory import is_out_of_memory, weigh
from bapipe.torch.profiler.layer_runner import LayerSequence, RunnableLayer
from bapipe.torch.profiler.layer_timing import PieceTimes, Walk, empty_piece, inputs_of, time_piece, walk
from bapipe.torch.profiler.measure_settings import ROUNDS, MeasureSettings
from bapipe.torch.profiler.measurement import Measurement, OptimizerTiming, Reading, UnitTiming
from bapipe.torch.profiler.measurement_cache import load_measurement, save_measurement
from bapipe.torch.profiler.optimizer_step import time_optimizer, weigh_optimizer
from bapipe.torch.profiler.part_timing import divisible, parts_to_time, time_parts
from bapipe.torch.profiler.statistics import Stopping, summarise
from bapipe.torch.profiler.whole_step import steps_left, time_whole

__all__ = ["Report", "measure"]

_SAVE_EVERY = 2.0
_LONG = 0.02
"""seconds of backward from which on the second round neither warms up nor takes the gradients apart again"""
_LARGE = 5e-3
"""seconds of a CPU's forward from which on a layer is timed alone without further asking"""
_LONG_STEP = 0.5
"""seconds of a whole step from which on it is a long one"""
_WHOLE_SECONDS = 0.3
"""to spend on a whole step each time on a GPU: where the host limits it, it varies by a tenth and more"""

_OPTIMIZER_TOO_LARGE = "the optimizer step does not fit and counts as nothing"

Report = Callable[[str, float], None]
"""what was done, and its share of all that was to do"""


@dataclass(slots=True)
class _State:
    """What changes while measuring."""

    measured: Measurement
    settings: MeasureSettings
    report: Report
    done: float = 0.0
    total: float = 1.0
    saved: float = 0.0
    pieces: dict[tuple[int, int], RunnableLayer] = field(default_factory=dict)
    warm: set[tuple[int, int]] = field(default_factory=set)
    """(layer, size) of the units that have run in this process"""
    step: float = 0.0
    """seconds of a whole step per sample on the host, roughly; 0: not known"""
    walked: tuple[int, Walk] | None = None
    """the size that the layers' inputs are at hand for, and these; of a CPU only"""

    def advance(self, label: str, weight: float) -> None:
        self.done += weight
        if time.monotonic() - self.saved > _SAVE_EVERY:
            self.save()
        self.report(label, min(1.0, self.done / self.total))
        if self.settings.deadline is not None and time.monotonic() > self.settings.deadline:
            raise KeyboardInterrupt

    def save(self) -> None:
        save_measurement(self.measured, self.settings.folder)
        self.saved = time.monotonic()

    def drop(self, size: int) -> None:
        """Note that a size does not fit."""
        self.measured = replace(
            self.measured,
            not_fitting=tuple(sorted({*self.measured.not_fitting, size})),
            timings=tuple(item for item in self.measured.timings if item.microbatch != size),
            memory=tuple(item for item in self.measured.memory if item.microbatch != size),
            parts=tuple(item for item in self.measured.parts if item.microbatch != size),
        )


def measure(
    chain: LayerSequence, empty: Measurement, settings: MeasureSettings, *, report: Report
) -> tuple[Measurement, bool]:
    """Measure what the cache does not have yet; returns what is known and whether that is all.

    Ctrl-C, or the deadline, ends it early with what was measured kept. Out of memory drops that size and all
    larger ones. The order of sizes and layers is random, the same for the same seed.
    """
    if not settings.microbatches or min(settings.microbatches) < 1:
        raise BaPipeError(f"micro-batch sizes must be at least 1, got {list(settings.microbatches)[:8]}")
    known = empty if settings.fresh else load_measurement(empty, settings.folder)
    state = _State(measured=known, settings=settings, report=report)
    clock = clock_of(chain.device)
    complete = False
    gc.collect()
    gc.freeze()  # the tracer's third of a million objects are not to be searched while something is timed
    try:
        if not state.measured.units:
            _group(chain, state, clock)
        state.total = ROUNDS * sum(settings.microbatches) * _things(state) + 1.0
        for round_ in range(ROUNDS):
            if settings.iterations == 1 and round_:
                break
            sizes = sorted(settings.microbatches)
            random.Random(f"{settings.seed}/{round_}").shuffle(sizes)
            for size in sizes:
                _measure_size(chain, state, clock, size, round_)
            _measure_optimizer(chain, state, clock, round_)
        complete = True
    except KeyboardInterrupt:
        pass
    finally:
        gc.unfreeze()
        state.save()
    return state.measured, complete


def _things(state: _State) -> int:
    """What there is to measure at each size: units, layers in parts, memory and the whole step."""
    return len(state.measured.units) + (len(divisible(state.measured)) if state.settings.parts else 0) + 2


def _warmup(chain: LayerSequence) -> int:
    return 3 if chain.device.type == "cuda" else 1


def _group(chain: LayerSequence, state: _State, clock: CudaClock | HostClock) -> None:
    """Time an empty layer and, roughly, each layer; join those too small to time alone."""
    size = min(state.settings.microbatches)
    piece, inputs = empty_piece(chain.device, _dtype_of(chain))
    nothing = time_piece(piece, inputs, clock=clock, stopping=Stopping(exact=25), warmup=10)
    issue = empty_issue(piece, inputs) if chain.device.type == "cuda" else (None, None)
    sized = chain.at(size)
    pieces = _layers(sized, state)
    with _memory_errors(state.measured.model, size):
        values = _walk(sized, state, size)
        rough = [_roughly(chain, piece, values, clock) for piece in pieces]
    state.warm |= {(index, size) for index in range(len(pieces))}
    state.step = sum(item.forward.host.median + item.backward.host.median for item in rough) / size
    units, forward, backward = find_units(
        [item.forward for item in rough],
        [item.backward for item in rough],
        nothing.forward,
        nothing.backward,
        [any(piece.receives) for piece in pieces],
    )
    state.measured = replace(
        state.measured,
        units=units,
        shares_forward=forward,
        shares_backward=backward,
        empty_forward=nothing.forward,
        empty_backward=nothing.backward,
        empty_issue_forward=issue[0],
        empty_issue_backward=issue[1],
    )


def _roughly(chain: LayerSequence, piece: RunnableLayer, values: Walk, clock: CudaClock | HostClock) -> PieceTimes:
    """One sample; of what is clearly large enough to be timed alone, a guess."""
    forward = values.seconds[piece.first]
    if chain.device.type == "cpu" and forward > _LARGE:
        own = Reading(host=summarise([forward]))
        return PieceTimes(forward=own, backward=Reading(host=summarise([2 * forward])), input_gradient=None)
    inputs = inputs_of(piece, values, chain.device)
    return time_piece(
        piece, inputs, clock=clock, stopping=Stopping(exact=1), warmup=_warmup(chain) - 1, apart=False
    )


@contextlib.contextmanager
def _memory_errors(model: str, size: int) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise BaPipeError(
                f"a micro-batch of {size} does not fit on this device; profile smaller ones or a smaller model"
            ) from error
        raise _failure(model, size, error) from error


def _failure(model: str, size: int, error: Exception) -> BaPipeError:
    """What a layer raised, as a mistake that names the size."""
    if isinstance(error, BaPipeError):
        return error
    line = (str(error).splitlines() or [""])[0][:200]
    return BaPipeError(
        f"{model} fails with a micro-batch of {size}: {type(error).__name__}: {line}; "
        "profile other sizes or correct it"
    )


def _layers(chain: LayerSequence, state: _State) -> list[RunnableLayer]:
    return [_piece(chain, state, index, index) for index in range(len(chain.layers))]


def _piece(chain: LayerSequence, state: _State, first: int, last: int) -> RunnableLayer:
    if (first, last) not in state.pieces:
        state.pieces[first, last] = chain.piece(first, last)
    return state.pieces[first, last]


def _walk(chain: LayerSequence, state: _State, size: int) -> Walk:
    """What every layer receives at that size; on a CPU the last one's is kept, it takes a forward to make."""
    if state.walked is not None and state.walked[0] == size:
        return state.walked[1]
    state.walked = None
    values = walk(chain, _layers(chain, state), size)
    if chain.device.type == "cpu":
        state.walked = (size, values)
    return values


def _measure_size(
    chain: LayerSequence, state: _State, clock: CudaClock | HostClock, size: int, round_: int
) -> None:
    """All units, memory and the whole step at one size, in random order."""
    weight = float(size)
    measured = state.measured
    share = weight * _things(state)
    if measured.not_fitting and size >= min(measured.not_fitting):
        state.drop(size)
        state.advance(f"{size}: does not fit", share)
        return
    least = state.settings.stopping(round_).exact or 1
    todo = [
        unit
        for unit in measured.units
        if not any(
            item.round == round_ and item.forward.host.count >= least for item in measured.rounds(size, unit[0])
        )
    ]
    parts = parts_to_time(measured, size, round_, least=least) if state.settings.parts else []
    weighed = any(item.microbatch == size for item in measured.memory)
    stepped = not state.settings.whole or _steps_left(state, size, round_) == 0
    state.done += share - weight * (len(todo) + len(parts) + (not weighed) + (not stepped))
    if not todo and not parts and weighed and stepped:
        return
    sized = chain.at(size)
    if sized is not chain:
        state.pieces.clear()
        state.walked = None
    if not stepped and todo and not _is_long(state, size):
        _measure_whole(sized, state, size, round_)
    try:
        order: list[tuple[int, int] | int] = [*todo, *parts]
        _time_units(sized, state, clock, size, round_, order, whole=not stepped and _is_long(state, size))
        if not weighed:
            memory = weigh(sized, _layers(sized, state), size)
            state.measured = replace(state.measured, memory=(*state.measured.memory, memory))
            state.advance(f"{size}: memory", weight)
    except Exception as error:
        if not is_out_of_memory(error):
            raise _failure(state.measured.model, size, error) from error
        state.drop(size)
        state.advance(f"{size}: does not fit", weight)
        _free(chain)
        return
    finally:
        if sized is not chain:
            state.pieces.clear()
            state.walked = None
    if not stepped:
        while _steps_left(state, size, round_) > 0:
            _measure_whole(sized, state, size, round_)
        state.advance(f"{size}: whole step", weight)
    _free(chain)


def _time_units(
    chain: LayerSequence,
    state: _State,
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
    values = _walk(chain, state, size)
    order = list(units)
    random.Random(f"{state.settings.seed}/{round_}/{size}").shuffle(order)
    for count, unit in enumerate(order):
        if whole and count == len(order) // 2:
            _measure_whole(chain, state, size, round_)
        if isinstance(unit, int):
            _time_parts(chain, state, clock, values, size, round_, unit)
            continue
        first, last = unit
        piece = _piece(chain, state, first, last)
        before = state.measured.rounds(size, first)
        long = any(item.backward.host.median > _LONG for item in before)
        warm = (first, size) in state.warm
        state.warm.add((first, size))
        times = time_piece(
            piece,
            inputs_of(piece, values, chain.device),
            clock=clock,
            stopping=state.settings.stopping(round_),
            warmup=0 if long or (warm and chain.device.type == "cpu") else _warmup(chain),
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
    state: _State,
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
            warmup=0 if long else _warmup(chain),
            whole=(layer, layer) not in measured.units,
            weigh=all(item.stash is None for item in before if item.round != round_),
        )
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        state.measured = measured.without_parts(size)
        _free(chain)
    else:
        state.measured = measured.with_parts(timing)
    state.advance(f"{size}: {chain.layers[layer].name} in parts", float(size))


def _measure_whole(chain: LayerSequence, state: _State, size: int, round_: int) -> None:
    try:
        stopping = replace(state.settings.stopping(round_), minimum=1)
        warmup = 0
        if chain.device.type != "cpu":
            stopping = replace(stopping, minimum=3, seconds=max(stopping.seconds, _WHOLE_SECONDS))
            warmup = _warmup(chain)
        units = [_piece(chain, state, first, last) for first, last in state.measured.units]
        step = time_whole(chain, size, units=units, round_=round_, stopping=stopping, warmup=warmup)
        state.measured = replace(state.measured, whole=(*state.measured.whole, step))
    except Exception as error:
        if not is_out_of_memory(error):
            raise _failure(state.measured.model, size, error) from error
        notes = dict.fromkeys((*state.measured.notes, _too_large(size)))
        state.measured = replace(state.measured, notes=tuple(notes))


def _is_long(state: _State, size: int) -> bool:
    known = state.measured.step(size)
    return (known.median if known else state.step * size) >= _LONG_STEP


def _steps_left(state: _State, size: int, round_: int) -> int:
    """How often the whole step is still to be timed in this round."""
    if _too_large(size) in state.measured.notes:
        return 0
    found = [(item.round, item.eager.median) for item in state.measured.whole if item.microbatch == size]
    return steps_left(found, round_, long=_is_long(state, size))


def _too_large(size: int) -> str:
    return f"the whole step does not fit at {size}"


def _measure_optimizer(chain: LayerSequence, state: _State, clock: CudaClock | HostClock, round_: int) -> None:
    """The step of each layer that has weights, one of a kind, and of a single number; and what one keeps."""
    measured = state.measured
    done = {item.layer for item in measured.optimizer_steps if item.round == round_}
    layers = [index for index in _one_of_a_kind(measured) if measured.layers[index].steps_weights]
    if not layers or {None, *layers} <= done or _OPTIMIZER_TOO_LARGE in measured.notes:
        return
    try:
        if None not in done:
            single = [nn.Parameter(torch.zeros(1, device=chain.device, dtype=_dtype_of(chain)))]
            _time_optimizer(chain, state, clock, round_, None, single)
        for index in layers:
            parameters = _piece(chain, state, index, index).parameters
            if index not in done and parameters:
                _time_optimizer(chain, state, clock, round_, index, parameters)
        if state.measured.optimizer_bytes is None:
            all_ = {id(item): item for index in layers for item in _piece(chain, state, index, index).parameters}
            weighed = weigh_optimizer(measured.optimizer, list(all_.values()))
            state.measured = replace(state.measured, optimizer_bytes=weighed)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        state.measured = replace(state.measured, notes=(*state.measured.notes, _OPTIMIZER_TOO_LARGE))
    state.advance("optimizer step", 0.5)
    _free(chain)


def _one_of_a_kind(measured: Measurement) -> list[int]:
    """The measured layers without those that repeat an earlier one."""
    if measured.repeats is None:
        return list(range(len(measured.layers)))
    return sorted({alike[0] for alike in measured.repeats.timed_as})


def _time_optimizer(
    chain: LayerSequence,
    state: _State,
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
        warmup=_warmup(chain),
        mixed=chain.mixed,
    )
    if reading is not None:
        timing = OptimizerTiming(layer=layer, round=round_, reading=reading)
        state.measured = replace(state.measured, optimizer_steps=(*state.measured.optimizer_steps, timing))


def _dtype_of(chain: LayerSequence) -> torch.dtype:
    return next((item.dtype for item in chain.module.parameters() if item.is_floating_point()), torch.float32)


def _free(chain: LayerSequence) -> None:
    if chain.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
