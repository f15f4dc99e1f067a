"""The layer view: each layer's cost, where the cuts fell, and what crosses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from bapipe.records.plan import Plan
from bapipe.reporting.charts.frame import (
    CHARACTER,
    WIDTH,
    Chart,
    Scale,
    label,
    legend,
    log_ticks,
    rect,
    short,
    y_axis,
)
from bapipe.reporting.drawing.action_styles import LOOKS
from bapipe.reporting.views.layer_view import Cut, LayerView, ShownLayer, cuts_of
from bapipe.schedule.actions import Kind
from bapipe.units import format_bytes, format_seconds

__all__ = ["MOST_COLUMNS", "layers_chart", "stages_chart"]

MOST_COLUMNS = 320
"""beyond so many layers, neighbours share a column"""
_LEFT, _RIGHT, _TOP = 58.0, WIDTH - 8, 34.0
_TIMES, _BYTES = 170.0, 70.0
"""heights of the two pictures"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Column:
    """One layer, or neighbours that share a column."""

    first: int
    last: int
    name: str
    forward: float
    backward: float
    boundary: float
    """bytes that would cross a cut after the last, both ways"""


def layers_chart(view: LayerView) -> Chart:
    """Bars of forward and backward per layer over bytes that would cross after it, cut by cut."""
    columns = _columns(view.layers)
    bands = [0.0, *(cut.position for cut in view.cuts), float(len(view.layers))]
    parts = _pictures(columns, view.cuts, bands, count=len(view.layers))
    notes = "dashed: cuts; lower picture: bytes per micro-batch that would cross after each layer, logarithmic"
    if len(columns) < len(view.layers):
        notes += f"; {len(view.layers)} layers in {len(columns)} columns"
    bottom = _TOP + _TIMES + 40 + _BYTES
    entries = [(kind.name, f"{kind.name} {LOOKS[kind].name}") for kind in (Kind.F, Kind.B)]
    parts.append(legend([*entries, ("bytes", "crosses forward and back")], x=_LEFT, y=bottom + 30))
    parts.append(label(_LEFT, bottom + 48, notes, "soft"))
    slowest = max(view.layers, key=lambda layer: layer.forward + layer.backward)
    title = (
        f"Cost of {len(view.layers)} layers in {len(bands) - 1} stages; the longest is {short(slowest.name)} with "
        f"{format_seconds(slowest.forward + slowest.backward)} per micro-batch"
    )
    return Chart(name="layers", title=title, height=bottom + 56, body="".join(parts))


def stages_chart(plan: Plan) -> Chart:
    """The same for a plan without its profile: the stages' sums in place of the layers."""
    columns = [
        _Column(
            first=number,
            last=number,
            name=f"stage {number}: {short(stage.layers[0], 40)} … {short(stage.layers[-1], 40)}",
            forward=stage.forward,
            backward=stage.backward,
            boundary=stage.send_forward_bytes
            + (plan.stages[number + 1].send_backward_bytes if number + 1 < len(plan.stages) else 0.0),
        )
        for number, stage in enumerate(plan.stages)
    ]
    cuts = [
        Cut(
            stage=cut.stage,
            position=float(cut.stage + 1),
            forward_bytes=cut.forward_bytes,
            backward_bytes=cut.backward_bytes,
        )
        for cut in cuts_of(plan)
    ]
    bands = [float(number) for number in range(len(columns) + 1)]
    parts = _pictures(columns, cuts, bands, count=len(columns))
    bottom = _TOP + _TIMES + 40 + _BYTES
    entries = [(kind.name, f"{kind.name} {LOOKS[kind].name}") for kind in (Kind.F, Kind.B)]
    parts.append(legend([*entries, ("bytes", "crosses forward and back")], x=_LEFT, y=bottom + 30))
    parts.append(
        label(_LEFT, bottom + 48, "sums of the stages: plan.json does not hold each layer's cost", "soft")
    )
    title = f"Cost of {len(columns)} stages; their layers' costs are in the profile"
    return Chart(name="layers", title=title, height=bottom + 56, body="".join(parts))


def _columns(layers: Sequence[ShownLayer]) -> list[_Column]:
    each = -(-len(layers) // MOST_COLUMNS)
    columns = []
    for low in range(0, len(layers), each):
        group = layers[low : low + each]
        name = short(group[0].name) if len(group) == 1 else f"{short(group[0].name)} … {short(group[-1].name)}"
        columns.append(
            _Column(
                first=group[0].index,
                last=group[-1].index,
                name=name,
                forward=sum(layer.forward for layer in group),
                backward=sum(layer.backward for layer in group),
                boundary=group[-1].boundary_forward + group[-1].boundary_backward,
            )
        )
    return columns


def _pictures(columns: Sequence[_Column], cuts: Sequence[Cut], bands: Sequence[float], *, count: int) -> list[str]:
    across = Scale(low=0.0, high=float(count), start=_LEFT, end=_RIGHT)
    longest = max(column.forward + column.backward for column in columns) or 1.0
    up = Scale(low=0.0, high=longest * 1.05, start=_TOP + _TIMES, end=_TOP)
    bytes_top = _TOP + _TIMES + 40
    parts = _bands(across, bands, bytes_top)
    parts.append(y_axis(up, left=_LEFT, right=_RIGHT, words=format_seconds))
    sizes = [column.boundary for column in columns if column.boundary > 0]
    levels = None
    if sizes:
        low, high = min(sizes) / 1.5, max(sizes) * 1.2
        levels = Scale(low=low, high=high, start=bytes_top + _BYTES, end=bytes_top, logarithmic=True)
        for value in log_ticks(low, high, 4):
            parts.append(f'<path class="grid" d="M{_LEFT:.1f},{levels(value):.1f}H{_RIGHT:.1f}"/>')
            parts.append(label(_LEFT - 6, levels(value) + 4, format_bytes(value), "soft", "end"))
    gap = min(1.5, (across(1) - across(0)) / 6)
    for column in columns:
        x, width = across(column.first), across(column.last + 1) - across(column.first) - gap
        place = (
            f"layer {column.first}" if column.first == column.last else f"layers {column.first} to {column.last}"
        )
        name = column.name if column.name.startswith("stage ") else f"{place}, {column.name}"
        forward, both = up(column.forward), up(column.forward + column.backward)
        parts.append(
            rect(x, forward, width, up(0) - forward, "F", f"{name}: forward {format_seconds(column.forward)}")
        )
        parts.append(
            rect(x, both, width, forward - both, "B", f"{name}: backward {format_seconds(column.backward)}")
        )
        if levels is not None and column.boundary > 0:
            y = levels(column.boundary)
            said = f"{name}: {format_bytes(column.boundary)} would cross after it"
            parts.append(rect(x, y, width, bytes_top + _BYTES - y, "bytes", said))
    parts.extend(_cuts(across, cuts, bytes_top))
    return parts


def _bands(across: Scale, bands: Sequence[float], bytes_top: float) -> list[str]:
    """Every other stage shaded, each with its number where it fits."""
    parts = []
    for number, (low, high) in enumerate(pairwise(bands)):
        x, width = across(low), across(high) - across(low)
        if number % 2 == 0:
            parts.append(rect(x, _TOP - 16, width, bytes_top + _BYTES - _TOP + 16, "band"))
        words = f"stage {number}" if width > 8 * CHARACTER else str(number)
        if width > (len(words) + 0.5) * CHARACTER:
            parts.append(label(x + width / 2, _TOP - 20, words, "middle", "strong"))
    return parts


def _cuts(across: Scale, cuts: Sequence[Cut], bytes_top: float) -> list[str]:
    """A dashed line per cut and what crosses it, where there is room for the words."""
    parts = []
    occupied = -1e9
    for cut in cuts:
        x = across(cut.position)
        parts.append(f'<path class="cut" d="M{x:.1f},{_TOP - 16:.1f}V{bytes_top + _BYTES:.1f}"/>')
        words = f"{format_bytes(cut.forward_bytes)} →  ← {format_bytes(cut.backward_bytes)}"
        half = len(words) * CHARACTER / 2
        if x - half > occupied:
            parts.append(label(min(max(x, half + 2), WIDTH - half), bytes_top - 14, words, "middle"))
            occupied = x + half
    return parts
