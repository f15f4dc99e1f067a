"""From what was measured to a Profile, and how well its sum agrees with the whole step. Uses no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bapipe.errors import BaPipeError
from bapipe.model import ModelRef
from bapipe.profile import CostTable, Profile, ProfiledLayer
from bapipe.torch.measure.record import Measurement, Reading, seconds
from bapipe.torch.measure.statistics import pooled

__all__ = [
    "Agreement",
    "PartRows",
    "Parts",
    "SizeTimes",
    "agreement",
    "layer_times",
    "part_costs",
    "parts",
    "run_ahead",
    "spread",
    "to_profile",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeTimes:
    """Seconds of every layer at one micro-batch size."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight_gradient: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRows:
    """What either part of each layer costs beyond its share at one micro-batch size, 0 where it has no parts."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    stash: tuple[float, ...]

    def times(self, time: float, size: float) -> PartRows:
        """Times by one factor, bytes by the other."""
        return PartRows(
            forward=tuple(value * time for value in self.forward),
            backward=tuple(value * time for value in self.backward),
            stash=tuple(value * size for value in self.stash),
        )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the sum of layers of a GPU is made of, to tell which part is off where it differs from the step."""

    device: float
    """seconds, all units one after the other on the device"""
    issue: float | None
    """seconds until the host has issued all of them within a step; None: not taken"""
    alone: float
    """seconds until the host has issued all of them, each alone after a pause"""
    layers_alone: float
    """the sum of layers with the host's time of each alone"""


def run_ahead(host: Sequence[float], device: Sequence[float | None]) -> list[float]:
    """What each of consecutive pieces of work adds to the time at which a GPU is done with them.

    The host issues ahead and the device follows: issued(k) = issued(k−1) + host(k) and
    finished(k) = max(finished(k−1) + device(k), issued(k)). Work that the device has no time of its own for is
    waited for. The sum is the time of the whole, where a sum of max(host, device) would count twice what overlaps.
    """
    issued = finished = 0.0
    added = []
    for own, work in zip(host, device, strict=True):
        if work is None:
            end = issued = max(issued, finished) + own
        else:
            issued += own
            end = max(finished + work, issued)
        added.append(end - finished)
        finished = end
    return added


def layer_times(measured: Measurement, microbatch: int, *, in_step: bool = True) -> SizeTimes:
    """Every layer's seconds at a size, both rounds pooled, what timing one by one adds taken off.

    The host's time to issue a layer for a GPU is that within a step where it is known and `in_step`; else (as
    where the whole step does not fit) that of the layer alone.
    """
    readings = [measured.rounds(microbatch, first) for first, _ in measured.units]
    ahead, back = _net_units(measured, microbatch)
    weights = []
    for items, whole in zip(readings, back, strict=True):
        total = max(whole[0], whole[1] or 0.0)
        alone = _net([item.input_gradient for item in items if item.input_gradient], measured.empty_backward)
        weights.append(1 - min(1.0, max(alone[0], alone[1] or 0.0) / total) if total > 0 else 0.0)
    issue = measured.issue(microbatch) if in_step else None
    if issue is not None:
        ahead, back = _issued(ahead, issue[0]), _issued(back, issue[1])
    order = [*ahead, *reversed(back)]
    added = run_ahead([host for host, _ in order], [device for _, device in order])
    forward_units, backward_units = added[: len(ahead)], added[len(ahead) :][::-1]
    forward, backward, gradient = [], [], []
    for index, (first, last) in enumerate(measured.units):
        for layer in range(first, last + 1):
            forward.append(forward_units[index] * measured.shares_forward[layer])
            backward.append(backward_units[index] * measured.shares_backward[layer])
            gradient.append(backward[-1] * weights[index] if measured.layers[layer].parameters else 0.0)
    return SizeTimes(forward=tuple(forward), backward=tuple(backward), weight_gradient=tuple(gradient))


def part_costs(measured: Measurement, microbatch: int) -> PartRows | None:
    """Half of what a layer's two parts take and keep beyond the layer itself, at least 0; None: not all are timed.

    Of a GPU a part's time is the device's or, where that is longer, the host's to issue it alone, and so is the
    layer's that it is held against: an issue-bound layer's parts are issued faster within a step.
    """
    forward, backward, stash = [], [], []
    for index, layer in enumerate(measured.layers):
        if layer.split is None:
            forward.append(0.0)
            backward.append(0.0)
            stash.append(0.0)
            continue
        found = measured.part_rounds(microbatch, index)
        if not found:
            return None
        alone = measured.rounds(microbatch, index) if (index, index) in measured.units else []
        ahead = [item.forward for item in alone] or [item.whole_forward for item in found if item.whole_forward]
        back = [item.backward for item in alone] or [item.whole_backward for item in found if item.whole_backward]
        if not ahead or not back:
            return None
        halves = [[item.forward[part] for item in found] for part in (0, 1)]
        forward.append(_beyond(halves, ahead, measured.empty_forward))
        halves = [[item.backward[part] for item in found] for part in (0, 1)]
        backward.append(_beyond(halves, back, measured.empty_backward))
        stash.append(max(0.0, next((item.stash for item in found if item.stash is not None), 0.0)) / 2)
    return PartRows(forward=tuple(forward), backward=tuple(backward), stash=tuple(stash))


def _beyond(parts: Sequence[Sequence[Reading]], whole: Sequence[Reading], empty: Reading | None) -> float:
    *own, layer = (max(host, device or 0.0) for host, device in (_net(item, empty) for item in (*parts, whole)))
    return max(0.0, (sum(own) - layer) / 2)


_Unit = tuple[float, float | None]
"""(host, device) seconds"""


def _net_units(measured: Measurement, microbatch: int) -> tuple[list[_Unit], list[_Unit]]:
    readings = [measured.rounds(microbatch, first) for first, _ in measured.units]
    return (
        [_net([item.forward for item in items], measured.empty_forward) for items in readings],
        [_net([item.backward for item in items], measured.empty_backward) for items in readings],
    )


def _issued(units: Sequence[_Unit], issue: Sequence[float]) -> list[_Unit]:
    """The host's times replaced, but of what the device has no time of its own for."""
    return [(host if device is None else own, device) for (host, device), own in zip(units, issue, strict=True)]


def parts(measured: Measurement, microbatch: int) -> Parts | None:
    """What the sum of layers is made of; None where some time is not a GPU's."""
    ahead, back = _net_units(measured, microbatch)
    device = [own for _, own in (*ahead, *back) if own is not None]
    if len(device) < len(ahead) + len(back):
        return None
    issue = measured.issue(microbatch)
    alone = layer_times(measured, microbatch, in_step=False)
    return Parts(
        device=sum(device),
        issue=sum(issue[0]) + sum(issue[1]) if issue is not None else None,
        alone=sum(host for host, _ in (*ahead, *back)),
        layers_alone=sum(alone.forward) + sum(alone.backward),
    )


def _net(readings: Sequence[Reading], empty: Reading | None) -> tuple[float, float | None]:
    if not readings:
        return 0.0, None
    host, device = seconds(readings)
    if device is not None:
        # The noise of issuing is one-sided: alone and after a pause a layer is issued more slowly than in a step.
        host = min(reading.host.low for reading in readings)
    return max(0.0, host - (empty.host.median if empty else 0.0)), device


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
    table = CostTable(
        source="measured",
        description=_description(measured, sizes, notes, calibrate),
        microbatches=sizes,
        forward=tuple(rows[size].forward for size in sizes),
        backward=tuple(rows[size].backward for size in sizes),
        weight_gradient=tuple(rows[size].weight_gradient for size in sizes),
        boundary_forward=tuple(item.boundary_forward for item in memory),
        boundary_backward=tuple(item.boundary_backward for item in memory),
        stash=tuple(item.stash for item in memory),
        update=_updates(measured),
        workspace=tuple(max(item.workspace) for item in memory),
        layer_workspace=tuple(item.workspace for item in memory),
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
    def scale(row: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(value * factor for value in row)

    return SizeTimes(
        forward=scale(times.forward), backward=scale(times.backward), weight_gradient=scale(times.weight_gradient)
    )


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
