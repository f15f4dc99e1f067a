"""The measuring itself: rounds over sizes and layers in random order, kept as it goes, resumed where it ended."""

from __future__ import annotations

import contextlib
import gc
import random
from collections.abc import Iterator
from dataclasses import replace

from bapipe.errors import BaPipeError
from bapipe.torch.profiler.grouping import find_units
from bapipe.torch.profiler.launch_overhead import empty_issue
from bapipe.torch.profiler.layer_clock import CudaClock, HostClock, clock_of
from bapipe.torch.profiler.layer_memory import is_out_of_memory, weigh
from bapipe.torch.profiler.layer_runner import LayerSequence, RunnableLayer
from bapipe.torch.profiler.layer_timing import PieceTimes, Walk, empty_piece, inputs_of, time_piece
from bapipe.torch.profiler.measure_optimizer import measure_optimizer
from bapipe.torch.profiler.measure_settings import ROUNDS, MeasureSettings
from bapipe.torch.profiler.measure_state import (
    MeasureState,
    Report,
    dtype_of,
    free_memory,
    layer_failure,
    warmup_of,
)
from bapipe.torch.profiler.measure_units import is_long, measure_whole, time_units, whole_steps_left
from bapipe.torch.profiler.measurement import Measurement, Reading
from bapipe.torch.profiler.measurement_cache import load_measurement
from bapipe.torch.profiler.part_timing import divisible, parts_to_time
from bapipe.torch.profiler.statistics import Stopping, summarise

__all__ = ["Report", "measure"]

_LARGE = 5e-3
"""seconds of a CPU's forward from which on a layer is timed alone without further asking"""


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
    state = MeasureState(measured=known, settings=settings, report=report)
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
            measure_optimizer(chain, state, clock, round_)
        complete = True
    except KeyboardInterrupt:
        pass
    finally:
        gc.unfreeze()
        state.save()
    return state.measured, complete


def _things(state: MeasureState) -> int:
    """What there is to measure at each size: units, layers in parts, memory and the whole step."""
    return len(state.measured.units) + (len(divisible(state.measured)) if state.settings.parts else 0) + 2


def _group(chain: LayerSequence, state: MeasureState, clock: CudaClock | HostClock) -> None:
    """Time an empty layer and, roughly, each layer; join those too small to time alone."""
    size = min(state.settings.microbatches)
    piece, inputs = empty_piece(chain.device, dtype_of(chain))
    nothing = time_piece(piece, inputs, clock=clock, stopping=Stopping(exact=25), warmup=10)
    issue = empty_issue(piece, inputs) if chain.device.type == "cuda" else (None, None)
    sized = chain.at(size)
    pieces = state.layers_of(sized)
    with _memory_errors(state.measured.model, size):
        values = state.walk(sized, size)
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
        piece, inputs, clock=clock, stopping=Stopping(exact=1), warmup=warmup_of(chain) - 1, apart=False
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
        raise layer_failure(model, size, error) from error


def _measure_size(
    chain: LayerSequence, state: MeasureState, clock: CudaClock | HostClock, size: int, round_: int
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
    stepped = not state.settings.whole or whole_steps_left(state, size, round_) == 0
    state.done += share - weight * (len(todo) + len(parts) + (not weighed) + (not stepped))
    if not todo and not parts and weighed and stepped:
        return
    sized = chain.at(size)
    if sized is not chain:
        state.pieces.clear()
        state.walked = None
    if not stepped and todo and not is_long(state, size):
        measure_whole(sized, state, size, round_)
    try:
        order: list[tuple[int, int] | int] = [*todo, *parts]
        time_units(sized, state, clock, size, round_, order, whole=not stepped and is_long(state, size))
        if not weighed:
            memory = weigh(sized, state.layers_of(sized), size)
            state.measured = replace(state.measured, memory=(*state.measured.memory, memory))
            state.advance(f"{size}: memory", weight)
    except Exception as error:
        if not is_out_of_memory(error):
            raise layer_failure(state.measured.model, size, error) from error
        state.drop(size)
        state.advance(f"{size}: does not fit", weight)
        free_memory(chain)
        return
    finally:
        if sized is not chain:
            state.pieces.clear()
            state.walked = None
    if not stepped:
        while whole_steps_left(state, size, round_) > 0:
            measure_whole(sized, state, size, round_)
        state.advance(f"{size}: whole step", weight)
    free_memory(chain)
