"""Times of one layer, or of a few together: forward, backward, and what of the backward cannot be deferred."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bapipe.torch.compiling.layer_program import DeferredGradients
from bapipe.torch.profiler.layer_clock import Clock, CudaClock, Lap
from bapipe.torch.profiler.layer_memory import storage_of
from bapipe.torch.profiler.layer_runner import LayerSequence, RunnableLayer, cast_weights, run_once
from bapipe.torch.profiler.measurement import Reading
from bapipe.torch.profiler.statistics import Stopping, summarise
from bapipe.torch.stage.saved_tensors import SavedValues
from bapipe.torch.stage.split_backward import DelayedWeights, SplitBackward

__all__ = ["PieceTimes", "Walk", "empty_piece", "inputs_of", "time_piece", "walk"]

_SPLIT_SAMPLES = 2
"""per round, of the gradient of the received values alone, unless a number of iterations is asked for"""
_LONG = 0.04
"""seconds from which on one sample of these must do"""
_VOID = 12
"""void samples in a row after which a clock must have found another way"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Walk:
    """What every layer receives at one size, kept where it does not fill the device."""

    received: tuple[tuple[Tensor, ...], ...]
    """per layer, on the CPU"""
    leaves: tuple[Any, ...]
    """inputs of the model, on the device"""
    seconds: tuple[float, ...]
    """that each layer's forward took the host, roughly"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceTimes:
    """The times of one piece in one round."""

    forward: Reading
    backward: Reading
    input_gradient: Reading | None
    weight_gradient: Reading | None = None
    """of the rest of a backward in two parts; None: not taken apart"""
    delayed: float | None = None
    """bytes held between the two parts"""


def walk(chain: LayerSequence, pieces: Sequence[RunnableLayer], size: int) -> Walk:
    """One forward through all layers, remembering what goes into each; real values, since zeros can run faster."""
    leaves, _ = chain.inputs(size)
    received: list[tuple[Tensor, ...]] = []
    seconds: list[float] = []
    values: Sequence[Any] = ()
    for piece in pieces:
        received.append(tuple(value.detach().to("cpu", copy=piece.overwrites) for value in values))
        taken = (*values, *(leaves[index] for index in piece.roots))
        if piece.compiled:  # the first time it is compiled
            run_once(piece, taken)
        begun = time.perf_counter()
        values = run_once(piece, taken)
        seconds.append(time.perf_counter() - begun)
    return Walk(received=tuple(received), leaves=tuple(leaves), seconds=tuple(seconds))


def inputs_of(piece: RunnableLayer, values: Walk, device: torch.device) -> list[Any]:
    """What the piece receives, as leaves of autograd, and its roots."""
    received = [
        value.to(device, copy=True).requires_grad_(flag)
        for value, flag in zip(values.received[piece.first], piece.receives, strict=True)
    ]
    return [*received, *(values.leaves[index] for index in piece.roots)]


class _Run:
    """A piece with its inputs: fresh forwards, and backwards from fixed gradients."""

    def __init__(self, piece: RunnableLayer, inputs: Sequence[Any]) -> None:
        self.piece = piece
        self.inputs = list(inputs)
        self.leaves = [value for value in inputs[: len(piece.receives)] if value.requires_grad]
        self.errors: list[Tensor] = []
        self._split = SplitBackward(piece.parameters)

    def fresh(self) -> list[Any]:
        """Arguments of the next forward; nothing of the last one is left."""
        for leaf in self.leaves:
            leaf.grad = None
        return [value.clone() for value in self.inputs] if self.piece.overwrites else self.inputs

    def forward(self, arguments: Sequence[Any]) -> list[Tensor]:
        outputs = self.piece.run(*arguments)
        return [value for value in outputs if isinstance(value, Tensor) and value.requires_grad]

    def forward_deferring(self, arguments: Sequence[Any]) -> tuple[list[Tensor], list[DeferredGradients]]:
        """As `forward` of a compiled piece, whose backward leaves the weight gradients in the list."""
        outputs, deferred = self.piece.forward_deferring(arguments)
        return [value for value in outputs if isinstance(value, Tensor) and value.requires_grad], deferred

    def prepare(self, outputs: Sequence[Tensor]) -> None:
        """Gradients to start from, of the size that training has; and room for the parameters' own."""
        if not self.errors:
            self.errors = [torch.randn_like(value) / max(1, value.numel()) ** 0.5 for value in outputs]
        for parameter in self.piece.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def backward(self, outputs: Sequence[Tensor]) -> None:
        if outputs:
            torch.autograd.backward(outputs, self.errors)

    def gradient(self, outputs: Sequence[Tensor]) -> DelayedWeights:
        """The first part of a backward in two: the errors for the layer before."""
        return self._split.run(outputs, self.errors, self.leaves)


def time_piece(
    piece: RunnableLayer,
    inputs: Sequence[Any],
    *,
    clock: Clock,
    stopping: Stopping,
    warmup: int,
    apart: bool = True,
) -> PieceTimes:
    """Sample the piece until `stopping` has enough. Parameters' gradients are added to what is there.

    `apart`: the backward in two parts too, as zero-bubble orders run it.
    """
    run = _Run(piece, inputs)
    cast_weights(piece, inputs)
    if isinstance(clock, CudaClock):
        clock.reset()
    for _ in range(warmup):
        outputs = run.forward(run.fresh())
        run.prepare(outputs)
        run.backward(outputs)
    whole: list[list[Lap]] = []
    totals: list[float] = []
    begun = time.perf_counter()
    while not stopping.done(totals, spent=time.perf_counter() - begun):
        laps = _sample(clock, lambda: _whole_sample(run, clock))
        whole.append(laps)
        totals.append(sum(max(lap.host, lap.device or 0.0) for lap in (laps[0], laps[2])))
    times = PieceTimes(
        forward=_reading([laps[0] for laps in whole]),
        backward=_reading([laps[2] for laps in whole]),
        input_gradient=None if piece.parameters else _reading([laps[2] for laps in whole]),
    )
    if not apart or not run.leaves or not piece.parameters or not run.errors:
        return times
    count = stopping.exact or (_SPLIT_SAMPLES if min(totals) < _LONG else 1)
    held = 0.0

    def take() -> None:
        nonlocal held
        held = _split_sample(run, clock)

    parts = [_sample(clock, take) for _ in range(count)]
    return replace(
        times,
        input_gradient=_reading([laps[0] for laps in parts]),
        weight_gradient=_reading([laps[1] for laps in parts]),
        delayed=held,
    )


def _sample(clock: Clock, take: Any) -> list[Lap]:
    for _ in range(_VOID):
        take()
        laps = clock.read()
        if laps is not None:
            return laps
    raise AssertionError("the clock found no delay that is long enough, and did not do without")


def _whole_sample(run: _Run, clock: Clock) -> None:
    arguments = run.fresh()
    clock.begin()
    clock.chill(run.leaves)
    clock.mark()
    outputs = run.forward(arguments)
    clock.mark()
    run.prepare(outputs)
    clock.chill(run.errors)
    clock.mark()
    run.backward(outputs)
    clock.mark()


def _split_sample(run: _Run, clock: Clock) -> float:
    """Returns the bytes that are held between the two parts: what the second needs, weights and buffers apart."""
    if run.piece.compiled:
        return _compiled_split_sample(run, clock)
    arguments, saved = run.fresh(), SavedValues()
    clock.begin()
    with saved.watching():
        outputs = run.forward(arguments)
    clock.chill(run.errors)
    clock.mark()
    later = run.gradient(outputs)
    clock.mark()
    there = saved.values()
    needed = saved.used_by(later.run)
    clock.mark()
    return _held_bytes(run, [*later.gradients(), *(there[number] for number in needed)])


def _compiled_split_sample(run: _Run, clock: Clock) -> float:
    arguments = run.fresh()
    clock.begin()
    outputs, deferred = run.forward_deferring(arguments)
    clock.chill(run.errors)
    clock.mark()
    run.backward(outputs)
    clock.mark()
    held = [value for item in deferred for value in item.held]
    for item in deferred:
        item.run()
    clock.mark()
    return _held_bytes(run, held)


def _held_bytes(run: _Run, held: Sequence[Tensor]) -> float:
    known = run.piece.known_storages()
    return float(sum(nbytes for address, nbytes in set(map(storage_of, held)) if address not in known))


def _reading(laps: Sequence[Lap]) -> Reading:
    devices = [lap.device for lap in laps if lap.device is not None]
    return Reading(
        host=summarise([lap.host for lap in laps]),
        device=summarise(devices) if len(devices) == len(laps) else None,
    )


def empty_piece(device: torch.device, dtype: torch.dtype) -> tuple[RunnableLayer, list[Any]]:
    """A layer that does nothing, and an input for it: its time is what timing layers one by one adds to each."""
    piece = RunnableLayer(
        first=0,
        last=0,
        run=lambda value: (value.view_as(value),),
        parameters=(),
        receives=(True,),
        roots=(),
        overwrites=False,
    )
    return piece, [torch.ones(8, device=device, dtype=dtype, requires_grad=True)]
