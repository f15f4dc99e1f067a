"""From what was measured to a Profile, and how well its sum agrees with the whole step. Uses no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from bapipe.costs.fields import COST_FIELDS, CostTable
from bapipe.costs.profile import Profile, ProfiledLayer
from bapipe.errors import BaPipeError
from bapipe.models.layers import ModelRef
from bapipe.torch.profiler.layer_times import PartRows, SizeTimes, layer_times, model_times, part_costs
from bapipe.torch.profiler.measurement import Measurement, OptimizerBytes, SizeMemory, seconds
from bapipe.torch.profiler.repeated_layers import bytes_of_model, model_layers, row_of_model, times_of_model

__all__ = ["Agreement", "agreement", "spread", "to_profile"]


_LEAST_ERROR = 0.01
"""relative error below which no layer's time is taken to be known"""
_LARGEST_ERROR = 0.9
"""relative error that a profile tells at most, however unquiet the machine was"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The sum of layers beside the whole step, forward and backward, before any calibration."""

    microbatch: int
    layers: float
    """seconds, all layers"""
    eager: float
    """seconds, the module itself"""
    chain: float
    """seconds, all layers as one stage"""

    @property
    def residual(self) -> float:
        """By how much of the eager step the sum is too high."""
        return self.layers / self.eager - 1

    @property
    def chain_residual(self) -> float:
        """The same against all layers run as one stage, as a plan runs them."""
        return self.layers / self.chain - 1


def _delayed(measured: Measurement, microbatch: int) -> tuple[float, ...] | None:
    """What is held between the two parts, by layer; None: not weighed."""
    memory, found = measured.memory_at(microbatch), []
    for first, last in measured.units:
        items = measured.rounds(microbatch, first)
        weights = any(measured.layers[layer].trained for layer in range(first, last + 1))
        held = next((item.delayed for item in items if item.delayed is not None), None)
        if held is None and weights and any(item.input_gradient is not None for item in items):
            return None
        saved_activations = memory.saved_activations[first : last + 1]
        if held is None:
            # Nothing to defer; or no gradient to send on, so that all of the backward is deferred.
            held = sum(saved_activations) + memory.boundary_backward[last] if weights else 0.0
        total = sum(saved_activations)
        found += [
            held * (value / total if total > 0 else 1 / len(saved_activations)) for value in saved_activations
        ]
    return row_of_model(measured, found)


def agreement(measured: Measurement, microbatch: int) -> Agreement | None:
    """The sum of layers against the whole step; None where that was not measured."""
    eager, chain = measured.step(microbatch), measured.step(microbatch, eager=False)
    if eager is None or chain is None:
        return None
    whole = all(item.of_model for item in measured.whole if item.microbatch == microbatch)
    times = (model_times if whole else layer_times)(measured, microbatch)
    return Agreement(
        microbatch=microbatch,
        layers=sum(times.forward) + sum(times.backward),
        eager=eager.median,
        chain=chain.median,
    )


def spread(measured: Measurement, microbatch: int) -> tuple[float, float]:
    """(A/A, half-width): how far the two rounds' sums lie apart, and the layers' median interval, relative."""
    sums: dict[int, float] = {}
    widths = []
    for item in measured.timings:
        if item.microbatch == microbatch:
            for reading in (item.forward, item.backward):
                own = reading.device or reading.host
                sums[item.round] = sums.get(item.round, 0.0) + own.median
                widths.append(own.half_width)
    both = [sums[key] for key in sorted(sums)]
    difference = abs(both[1] - both[0]) / (sum(both) / 2) if len(both) == 2 and sum(both) > 0 else 0.0
    return difference, sorted(widths)[len(widths) // 2] if widths else 0.0


def to_profile(measured: Measurement, *, accelerator: str, model: ModelRef, calibrate: bool = False) -> Profile:
    """The profile of what is complete. `calibrate`: scale each size's times so that they sum to the whole step.

    Raises BaPipeError where no size is complete.
    """
    sizes = measured.sizes()
    if not sizes:
        lost = f"; {_listed(measured.not_fitting)} ran out of memory" if measured.not_fitting else ""
        raise BaPipeError(
            f"nothing of {measured.model} is measured completely{lost}; profile smaller micro-batches or go on"
        )
    rows = {size: model_times(measured, size) for size in sizes}
    divided = _part_rows(measured, sizes)
    notes = []
    for size in sizes:
        found = agreement(measured, size)
        if found is None:
            continue
        notes.append(f"{size}: {found.residual:+.1%}")
        if calibrate and found.layers > 0:
            rows[size] = _scaled(rows[size], found.eager / found.layers)
            if divided:
                divided[size] = divided[size].times(found.eager / found.layers, 1.0)
    memory = [bytes_of_model(measured, measured.memory_at(size)) for size in sizes]
    trained = _trainable(measured)
    if trained is not None:
        for size, own in zip(sizes, memory, strict=True):
            rows[size] = _without_backward(rows[size], own)
    waiting = [_delayed(measured, size) for size in sizes]
    table = CostTable(
        source="measured",
        description=_description(measured, sizes, notes, calibrate),
        microbatches=sizes,
        **_rows([rows[size] for size in sizes]),
        **_rows(memory),
        update=_optimizer_seconds(measured),
        optimizer=measured.optimizer,
        optimizer_state=_per_parameter(measured.optimizer_bytes, "state"),
        optimizer_workspace=_per_parameter(measured.optimizer_bytes, "workspace"),
        workspace=tuple(max(item.workspace) for item in memory),
        layer_workspace=tuple(item.workspace for item in memory),
        library=_most(memory, "library"),
        weight_casts=_casts(measured, memory),
        delayed=None if None in waiting else tuple(row for row in waiting if row is not None),
        trainable_bytes=trained,
        part_forward=tuple(divided[size].forward for size in sizes) if divided else None,
        part_backward=tuple(divided[size].backward for size in sizes) if divided else None,
        part_saved_activations=tuple(divided[size].saved_activations for size in sizes) if divided else None,
        not_fitting=measured.not_fitting,
        spread=min(_LARGEST_ERROR, max(_LEAST_ERROR, *(max(spread(measured, size)) for size in sizes))),
    )
    layers = tuple(
        ProfiledLayer(
            name=layer.name,
            parameters=layer.parameters,
            weight_bytes=layer.weight_bytes,
            split=layer.split,
            shares_weights_with=layer.shares_weights_with,
            modules=layer.modules,
        )
        for layer in model_layers(measured)
    )
    return Profile(
        model=replace(model, fingerprint=measured.fingerprint),
        dtype=measured.dtype,
        layers=layers,
        accelerators={accelerator: table},
        input_bytes=measured.input_bytes,
        compiled=measured.environment.compiled,
    )


def _trainable(measured: Measurement) -> tuple[float, ...] | None:
    """Bytes of each layer's weights that are trained, a tied one where it stands first; None: all are."""
    layers = model_layers(measured)
    if any(layer.trainable_bytes is None for layer in layers):
        return None
    return tuple(layer.stepped_bytes for layer in layers)


def _without_backward(times: SizeTimes, memory: SizeMemory) -> SizeTimes:
    """The same, with no backward of layers that no gradient comes back to: nothing up to them is trained."""
    count = len(times.forward)
    has = [size > 0 or index + 1 == count for index, size in enumerate(memory.boundary_backward)]

    def only(row: Sequence[float]) -> tuple[float, ...]:
        return tuple(value if own else 0.0 for value, own in zip(row, has, strict=True))

    return SizeTimes(
        forward=times.forward,
        backward=only(times.backward),
        weight_gradient=only(times.weight_gradient),
        parting=only(times.parting),
    )


def _parts_at(measured: Measurement, sizes: Sequence[int]) -> dict[int, PartRows]:
    """What parts cost at the sizes where all of them are timed."""
    if not measured.parts:
        return {}
    found = {size: part_costs(measured, size) for size in sizes}
    return {size: times_of_model(measured, rows) for size, rows in found.items() if rows is not None}


def _part_rows(measured: Measurement, sizes: Sequence[int]) -> dict[int, PartRows]:
    """What parts cost at every size; where they are not timed in proportion to the nearest size that has them."""
    known = _parts_at(measured, sizes)
    if not known:
        return {}
    rows = {}
    for size in sizes:
        near = min(known, key=lambda other: (abs(other - size), other))
        rows[size] = known[near].times(size / near, size / near)
    return rows


def _scaled(times: SizeTimes, factor: float) -> SizeTimes:
    scaled = {item.name: tuple(value * factor for value in getattr(times, item.name)) for item in fields(times)}
    return SizeTimes(**scaled)


def _rows(measured: Sequence[SizeTimes] | Sequence[SizeMemory]) -> dict[str, Any]:
    """The cost fields that have a row in each size's measurement; None where one size does not know it."""
    found = {}
    for item in fields(measured[0]):
        if item.name in COST_FIELDS and COST_FIELDS[item.name].per == "size and layer":
            rows = tuple(getattr(size, item.name) for size in measured)
            found[item.name] = rows if all(rows) else None
    return found


def _most(memory: Sequence[SizeMemory], name: str) -> tuple[float, ...] | None:
    """The most of any size; None where it was not weighed, or nothing is kept, as by libraries on a CPU."""
    known = [getattr(item, name) for item in memory if any(getattr(item, name))]
    return tuple(max(column) for column in zip(*known, strict=True)) if known else None


def _casts(measured: Measurement, memory: Sequence[SizeMemory]) -> tuple[float, ...] | None:
    """Of each layer, what autocast keeps of its weights: a tied weight counts where it stands first."""
    found = _most(memory, "weight_casts")
    if found is None:
        return None
    layers = model_layers(measured)
    return tuple(0.0 if layer.shares_weights_with else size for layer, size in zip(layers, found, strict=True))


def _optimizer_seconds(measured: Measurement) -> tuple[float, ...]:
    """Of each layer, what its step takes beyond that of a single number; and its share of that, by its weights.

    Of a GPU the device's time: one step is issued for all layers of a stage, and the host is then ahead.
    """
    layers = model_layers(measured)
    found = {layer: _taken(measured, layer) for layer in {item.layer for item in measured.optimizer_steps}}
    if None not in found:
        return (0.0,) * len(layers)
    host, device = found.pop(None)
    any_step = max(host, device or 0.0)
    own = [layer.stepped_bytes for layer in layers]

    def beyond(layer: int) -> float:
        taken, work = found.get(layer, (0.0, None))
        return max(0.0, taken - host if work is None or device is None else work - device)

    return tuple(
        beyond(same[0]) + any_step * weights / sum(own) if weights else 0.0
        for weights, same in zip(own, measured.alike(), strict=True)
    )


def _taken(measured: Measurement, layer: int | None) -> tuple[float, float | None]:
    """(host, device) seconds of the layer's optimizer step."""
    return seconds([item.reading for item in measured.optimizer_steps if item.layer == layer])


def _per_parameter(weighed: OptimizerBytes | None, what: str) -> float | None:
    """Bytes of the optimizer's state or workspace per number in the weights; None: not weighed."""
    return None if weighed is None else getattr(weighed, what) / weighed.parameters


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(str(size) for size in sizes)


def _description(measured: Measurement, sizes: Sequence[int], notes: Sequence[str], calibrate: bool) -> str:
    worst, width = max(spread(measured, size) for size in sizes)
    parts = [str(measured.environment), f"optimizer {measured.optimizer}"]
    parts.append(f"rounds differ by up to {worst:.1%}, medians known to {width:.1%}")
    if notes:
        what = "times scaled to the whole step; before that the sum of layers was off by" if calibrate else (
            "sum of layers against the whole step"
        )  # fmt: skip
        parts.append(f"{what} {', '.join(notes)}")
    timed = _parts_at(measured, sizes)
    if timed:
        rest = "" if len(timed) == len(sizes) else ", at other sizes in proportion to the nearest"
        parts.append(f"layers in two parts timed at {_listed(list(timed))}{rest}")
    return "; ".join((*parts, *measured.notes))
