"""Seconds of every layer from what was measured of the units: forward, backward, its parts, and divided layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from bapipe.torch.profiler.measurement import Measurement, Reading, seconds

__all__ = ["PartRows", "Parts", "SizeTimes", "layer_times", "model_times", "part_costs", "parts", "run_ahead"]


_Unit = tuple[float, float | None]
"""(host, device) seconds"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeTimes:
    """Seconds of every layer at one micro-batch size."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    parting: tuple[float, ...]
    """that the backward takes longer in two parts"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRows:
    """What either part of each layer costs beyond its share at one micro-batch size, 0 where it has no parts."""

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    saved_activations: tuple[float, ...]

    def times(self, time: float, size: float) -> PartRows:
        """Times by one factor, bytes by the other."""
        return PartRows(
            forward=tuple(value * time for value in self.forward),
            backward=tuple(value * time for value in self.backward),
            saved_activations=tuple(value * size for value in self.saved_activations),
        )


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
    """Every measured layer's seconds at a size, both rounds pooled, what timing one by one adds taken off.

    The host's time to issue a layer for a GPU is that within a step where it is known and `in_step`; else (as
    where the whole step does not fit) that of the layer alone.
    """
    return _times(measured, microbatch, [(layer,) for layer in range(len(measured.layers))], in_step=in_step)


def model_times(measured: Measurement, microbatch: int, *, in_step: bool = True) -> SizeTimes:
    """The same of every layer of the model, those included that others were measured for.

    How far a GPU's host runs ahead depends on all layers of the model, so the few that are measured are put in a
    row as long as the model. Layers that are alike share what they take together in equal parts.
    """
    if measured.repeats is None:
        return layer_times(measured, microbatch, in_step=in_step)
    found = _times(measured, microbatch, measured.alike(), in_step=in_step)
    places: dict[tuple[int, ...], list[int]] = {}
    for index, alike in enumerate(measured.repeats.timed_as):
        places.setdefault(alike, []).append(index)
    rows = {}
    for item in fields(found):
        row = getattr(found, item.name)
        mean = {alike: sum(row[index] for index in own) / len(own) for alike, own in places.items()}
        rows[item.name] = tuple(mean[alike] for alike in measured.repeats.timed_as)
    return SizeTimes(**rows)


def _times(
    measured: Measurement, microbatch: int, alike: Sequence[tuple[int, ...]], *, in_step: bool
) -> SizeTimes:
    """Seconds of layers in a row, each of them the mean of the measured ones that are alike."""
    ahead, back = _net_units(measured, microbatch)
    weights = _means(_by_layer(measured, _weight_shares(measured, microbatch, back)), alike)
    issue = measured.issue(microbatch) if in_step else None
    if issue is not None:
        ahead, back = _issued(ahead, issue[0]), _issued(back, issue[1])
    rows = [_mean_units(measured, ahead, measured.shares_forward, alike)]
    rows.append(_mean_units(measured, back, measured.shares_backward, alike))
    together = measured.issue_together(microbatch) if issue is not None else None
    if together is not None and len(alike) == len(measured.alike()):
        rows = [_limited(row, total) for row, total in zip(rows, together, strict=True)]
    order = [*rows[0], *reversed(rows[1])]
    added = run_ahead([host for host, _ in order], [device for _, device in order])
    backward = added[len(alike) :][::-1]
    trained = [any(measured.layers[layer].trained for layer in own) for own in alike]
    return SizeTimes(
        forward=tuple(added[: len(alike)]),
        backward=tuple(backward),
        weight_gradient=tuple(
            own * share if has else 0.0 for own, share, has in zip(backward, weights, trained, strict=True)
        ),
        parting=tuple(_means(_parting(measured, microbatch), alike)),
    )


def _weight_shares(measured: Measurement, microbatch: int, back: Sequence[_Unit]) -> list[float]:
    """Per unit, the part of its backward that makes weight gradients."""
    shares = []
    for (first, _), whole in zip(measured.units, back, strict=True):
        total = max(whole[0], whole[1] or 0.0)
        alone = _net(
            [item.input_gradient for item in measured.rounds(microbatch, first) if item.input_gradient],
            measured.empty_backward,
        )
        shares.append(1 - min(1.0, max(alone[0], alone[1] or 0.0) / total) if total > 0 else 0.0)
    return shares


def _by_layer(measured: Measurement, row: Sequence[float]) -> list[float]:
    """Each unit's value for every one of its layers."""
    return [row[index] for index, (first, last) in enumerate(measured.units) for _ in range(first, last + 1)]


def _means(row: Sequence[float], alike: Sequence[tuple[int, ...]]) -> list[float]:
    return [sum(row[layer] for layer in own) / len(own) for own in alike]


def _mean_units(
    measured: Measurement, units: Sequence[_Unit], shares: Sequence[float], alike: Sequence[tuple[int, ...]]
) -> list[_Unit]:
    """(host, device) of each layer: its share of its unit, the mean of those that are alike."""
    host = [own * share for own, share in zip(_by_layer(measured, [h for h, _ in units]), shares, strict=True)]
    work = [
        own * share for own, share in zip(_by_layer(measured, [d or 0.0 for _, d in units]), shares, strict=True)
    ]
    waited = _by_layer(measured, [float(d is None) for _, d in units])
    return [
        (own, None if any(waited[layer] for layer in same) else device)
        for own, device, same in zip(_means(host, alike), _means(work, alike), alike, strict=True)
    ]


def _limited(row: Sequence[_Unit], together: float) -> list[_Unit]:
    """The host's times scaled down to what it takes to issue all layers as one stage.

    A layer alone computes again what a stage computes once for all of its layers: masks, positions, rotary tables.
    """
    total = sum(host for host, device in row if device is not None)
    scale = min(1.0, together / total) if total > 0 else 1.0
    return [(host if device is None else host * scale, device) for host, device in row]


def _parting(measured: Measurement, microbatch: int) -> tuple[float, ...]:
    """What both parts of a backward take beyond the whole, by layer; of a GPU the device, as the host runs ahead.

    A unit's difference may be noise of either sign, so the units' excesses are scaled to what all take together.
    """

    def taken(readings: Sequence[Reading]) -> float:
        host, device = _net(readings, measured.empty_backward)
        return host if device is None else device

    over = []
    for first, _ in measured.units:
        items = [item for item in measured.rounds(microbatch, first) if item.weight_gradient is not None]
        before = taken([item.input_gradient for item in items if item.input_gradient is not None])
        after = taken([item.weight_gradient for item in items if item.weight_gradient is not None])
        over.append(before + after - taken([item.backward for item in items]))
    more = sum(max(0.0, value) for value in over)
    scale = max(0.0, sum(over)) / more if more > 0 else 0.0
    return tuple(
        max(0.0, over[index]) * scale * measured.shares_backward[layer]
        for index, (first, last) in enumerate(measured.units)
        for layer in range(first, last + 1)
    )


def part_costs(measured: Measurement, microbatch: int) -> PartRows | None:
    """Half of what a layer's two parts take and keep beyond the layer itself, at least 0; None: not all are timed.

    Of a GPU a part's time is the device's or, where that is longer, the host's to issue it alone, and so is the
    layer's that it is held against: an issue-bound layer's parts are issued faster within a step.
    """
    forward, backward, saved_activations = [], [], []
    for index, layer in enumerate(measured.layers):
        if layer.split is None:
            forward.append(0.0)
            backward.append(0.0)
            saved_activations.append(0.0)
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
        saved_activations.append(
            max(0.0, next((item.saved_activations for item in found if item.saved_activations is not None), 0.0))
            / 2
        )
    return PartRows(forward=tuple(forward), backward=tuple(backward), saved_activations=tuple(saved_activations))


def _beyond(parts: Sequence[Sequence[Reading]], whole: Sequence[Reading], empty: Reading | None) -> float:
    *own, layer = (max(host, device or 0.0) for host, device in (_net(item, empty) for item in (*parts, whole)))
    return max(0.0, (sum(own) - layer) / 2)


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
    """What the sum of the model's layers is made of; None where some time is not a GPU's."""
    ahead, back = _net_units(measured, microbatch)
    if any(device is None for _, device in (*ahead, *back)):
        return None
    alike = measured.alike()
    issue = measured.issue(microbatch)
    alone = model_times(measured, microbatch, in_step=False)

    def total(forward: Sequence[_Unit], backward: Sequence[_Unit], what: int) -> float:
        rows = (
            *_mean_units(measured, forward, measured.shares_forward, alike),
            *_mean_units(measured, backward, measured.shares_backward, alike),
        )
        return sum(item[what] or 0.0 for item in rows)

    return Parts(
        device=total(ahead, back, 1),
        issue=total(_issued(ahead, issue[0]), _issued(back, issue[1]), 0) if issue is not None else None,
        alone=total(ahead, back, 0),
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
