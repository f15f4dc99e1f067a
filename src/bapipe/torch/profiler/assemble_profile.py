"""From what was measured to a Profile, and how well its sum agrees with the whole step. Uses no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from bapipe.costs.fields import COST_FIELDS, CostTable
from bapipe.costs.profile import Profile, ProfiledLayer
from bapipe.errors import BaPipeError
from bapipe.models.layers import ModelRef
from bapipe.torch.profiler.layer_times import PartRows, SizeTimes, layer_times, part_costs
from bapipe.torch.profiler.measurement import Measurement, SizeMemory
from bapipe.torch.profiler.statistics import pooled

__all__ = ["Agreement", "agreement", "spread", "to_profile"]


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
        weights = any(measured.layers[layer].parameters for layer in range(first, last + 1))
        held = next((item.delayed for item in items if item.delayed is not None), None)
        if held is None and weights and any(item.input_gradient is not None for item in items):
            return None
        stash = memory.stash[first : last + 1]
        if held is None:
            # Nothing to put off; or no error to send on, so that all of the backward is put off.
            held = sum(stash) + memory.boundary_backward[last] if weights else 0.0
        total = sum(stash)
        found += [held * (value / total if total > 0 else 1 / len(stash)) for value in stash]
    return tuple(found)


def agreement(measured: Measurement, microbatch: int) -> Agreement | None:
    """The sum of layers against the whole step; None where that was not measured."""
    eager, chain = measured.step(microbatch), measured.step(microbatch, eager=False)
    if eager is None or chain is None:
        return None
    times = layer_times(measured, microbatch)
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
    rows = {size: layer_times(measured, size) for size in sizes}
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
    memory = [measured.memory_at(size) for size in sizes]
    waiting = [_delayed(measured, size) for size in sizes]
    table = CostTable(
        source="measured",
        description=_description(measured, sizes, notes, calibrate),
        microbatches=sizes,
        **_rows([rows[size] for size in sizes]),
        **_rows(memory),
        update=_updates(measured),
        optimizer=measured.optimizer,
        workspace=tuple(max(item.workspace) for item in memory),
        layer_workspace=tuple(item.workspace for item in memory),
        library=_library(memory),
        delayed=None if None in waiting else tuple(row for row in waiting if row is not None),
        part_forward=tuple(divided[size].forward for size in sizes) if divided else None,
        part_backward=tuple(divided[size].backward for size in sizes) if divided else None,
        part_stash=tuple(divided[size].stash for size in sizes) if divided else None,
        not_fitting=measured.not_fitting,
    )
    layers = tuple(
        ProfiledLayer(
            name=layer.name,
            parameters=layer.parameters,
            weight_bytes=layer.weight_bytes,
            split=layer.split,
            shares_weights_with=layer.shares_weights_with,
        )
        for layer in measured.layers
    )
    return Profile(
        model=replace(model, fingerprint=measured.fingerprint),
        dtype=measured.dtype,
        layers=layers,
        accelerators={accelerator: table},
        input_bytes=measured.input_bytes,
    )


def _parts_at(measured: Measurement, sizes: Sequence[int]) -> dict[int, PartRows]:
    """What parts cost at the sizes where all of them are timed."""
    if not measured.parts:
        return {}
    found = {size: part_costs(measured, size) for size in sizes}
    return {size: rows for size, rows in found.items() if rows is not None}


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


def _library(memory: Sequence[SizeMemory]) -> tuple[float, ...] | None:
    """The most of any size; None where it was not weighed, or nothing is kept, as on a CPU."""
    known = [item.library for item in memory if any(item.library)]
    return tuple(max(column) for column in zip(*known, strict=True)) if known else None


def _updates(measured: Measurement) -> tuple[float, ...]:
    """The whole model's step, dealt to the layers by their weights."""
    if not measured.update:
        return (0.0,) * len(measured.layers)
    host = pooled([item.reading.host for item in measured.update]).median
    devices = [item.reading.device for item in measured.update if item.reading.device is not None]
    total = max(host, pooled(devices).median) if devices else host
    own = [0.0 if layer.shares_weights_with else layer.weight_bytes for layer in measured.layers]
    return tuple(total * value / sum(own) if sum(own) > 0 else 0.0 for value in own)


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
