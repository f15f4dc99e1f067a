"""A Timeline drawn as a standalone SVG: no scripts, no fonts or styles from elsewhere.

Kinds differ in pattern as well as colour; neighbouring micro-batches differ in depth; every action says its name
and times when pointed at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

from bapipe.errors import BaPipeError
from bapipe.reporting.drawing.action_styles import LOOKS
from bapipe.reporting.drawing.labels import action_name, format_time, printable, ticks
from bapipe.reporting.drawing.patterns import patterns
from bapipe.reporting.drawing.rows import Row, consumers, rows_of, waits
from bapipe.reporting.drawing.time_cells import fill_cells, time_range
from bapipe.schedule.actions import Kind
from bapipe.simulator.timeline import Timeline

__all__ = ["MIN_SVG_WIDTH", "render_svg"]

Floats = NDArray[np.float64]

MIN_SVG_WIDTH = 300
"""pixels below which a drawing says nothing"""
_MARGIN, _CHARACTER, _AXIS, _LEGEND = 12.0, 6.7, 30.0, 22.0
"""pixels: around the drawing, of a letter, of the axis and of a line of the legend"""
_SHARE_PIXELS = 3
"""width of a cell where actions are too many to be drawn one by one"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Where times and rows lie, in pixels."""

    width: float
    left: float
    top: float
    row_height: float
    tops: tuple[float, ...]
    """of each row"""
    low: float
    scale: float
    """pixels per unit of time"""

    def x(self, time: float) -> float:
        return self.left + (time - self.low) * self.scale

    @property
    def right(self) -> float:
        return self.width - _MARGIN

    @property
    def bottom(self) -> float:
        return self.tops[-1] + self.row_height + 4


def render_svg(
    timeline: Timeline,
    *,
    title: str | None = None,
    unit: str | None = None,
    width: int = 1200,
    max_rects: int = 20_000,
) -> str:
    """The timeline as the text of an SVG of that width in pixels, a row per rank and lane.

    Up to `max_rects` actions: one rectangle per action, transfers as thin lines from the sender's row to the
    receiver's, waiting for them as a thin bar. Beyond that, actions are narrower than can be seen and are merged:
    each row shows how its rank's time is shared between the kinds, as stacked heights, and the drawing says so.

    unit "s": times are seconds; None: plain numbers. The title may be any text.
    """
    if width < MIN_SVG_WIDTH:
        raise BaPipeError(f"an SVG needs a width of at least {MIN_SVG_WIDTH}, got {width}; raise it")
    rows = rows_of(timeline)
    layout = _layout(timeline, rows, width, titled=title is not None)
    merged = len(timeline.kinds) > max_rects
    present = [kind for kind in LOOKS if (timeline.kinds == kind).any()]
    notes = _notes(timeline, unit, merged)
    legend, height = _legend(timeline, layout, present, notes, merged)
    heading = printable(title) if title is not None else "Timeline"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="bapipe-timeline" role="img" width="{width}" '
        f'height="{height:g}" viewBox="0 0 {width} {height:g}">',
        f"<title>{escape(heading)}</title>",
        _style(),
        *patterns(present),
        f'<rect class="page" width="{width}" height="{height:g}"/>',
    ]
    if title is not None:
        room = int((layout.right - _MARGIN) / (_CHARACTER * 1.25))
        shown = heading if len(heading) <= room else heading[: room - 1] + "…"
        parts.append(f'<text class="heading" x="{_MARGIN:g}" y="24">{escape(shown)}</text>')
    parts.extend(_frame(timeline, rows, layout, unit))
    if merged:
        parts.extend(_shares(timeline, rows, layout))
    else:
        parts.extend(_waiting(timeline, rows, layout, unit))
        parts.extend(_actions(timeline, rows, layout, unit))
        parts.extend(_transfers(timeline, rows, layout, unit))
    return "\n".join([*parts, *legend, "</svg>", ""])


def _layout(timeline: Timeline, rows: Sequence[Row], width: int, *, titled: bool) -> _Layout:
    low, high = time_range(timeline)
    # Very many ranks get thinner rows, so that the whole stays a page or two high.
    row_height = float(min(22, max(6, 2000 // max(1, len(rows)))))
    left = _MARGIN + _CHARACTER * max((len(row.title) for row in rows), default=0) + 8
    top = 36.0 if titled else _MARGIN
    tops, y = [], top
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None:
            y += row_height + (1 if before.rank == row.rank else max(2.0, row_height / 4))
        tops.append(y)
    # Room at the right for half the last time of the axis.
    scale = (width - _MARGIN - left - 24) / (high - low) if high > low else 0.0
    return _Layout(
        width=width,
        left=left,
        top=top,
        row_height=row_height,
        tops=tuple(tops) or (top,),
        low=low,
        scale=scale,
    )


def _style() -> str:
    return (
        "<style>.bapipe-timeline{font:11px ui-monospace,Menlo,Consolas,monospace}"
        ".bapipe-timeline text{fill:#222}.bapipe-timeline .heading{font-size:14px;font-weight:bold}"
        ".bapipe-timeline .page{fill:#fff}.bapipe-timeline .lane{fill:#eee}"
        ".bapipe-timeline .grid{stroke:#000;stroke-opacity:.12}.bapipe-timeline .tick{text-anchor:middle}"
        ".bapipe-timeline .label{pointer-events:none}.bapipe-timeline .name{text-anchor:end}"
        ".bapipe-timeline .odd{fill-opacity:.72}.bapipe-timeline .edge{stroke:#fff;stroke-width:.6}"
        ".bapipe-timeline .transfer{stroke:#333;stroke-opacity:.55;stroke-width:1}"
        ".bapipe-timeline .back{stroke-dasharray:3 2}.bapipe-timeline .wait{fill:#555}"
        + "".join(f".bapipe-timeline .{kind.name}{{fill:url(#bapipe-{kind.name})}}" for kind in LOOKS)
        + "".join(f".bapipe-timeline .on-{kind.name}{{fill:{look.ink}}}" for kind, look in LOOKS.items())
        + "</style>"
    )


def _frame(timeline: Timeline, rows: Sequence[Row], layout: _Layout, unit: str | None) -> Iterator[str]:
    """Row names, row backgrounds, and the axis under them with its lines."""
    end = layout.x(time_range(timeline)[1])
    for row, top in zip(rows, layout.tops, strict=False):
        size = min(11.0, layout.row_height)
        yield (
            f'<text class="name" x="{layout.left - 8:.1f}" y="{top + layout.row_height / 2 + size / 3:.1f}" '
            f'font-size="{size:g}">{escape(row.title)}</text>'
        )
        if not row.is_all_reduce:
            yield (
                f'<rect class="lane" x="{layout.left:.1f}" y="{top:.1f}" width="{end - layout.left:.1f}" '
                f'height="{layout.row_height:g}"/>'
            )
    for tick in ticks(time_range(timeline)[1], max(2, int((end - layout.left) / 90))):
        x = layout.x(tick)
        yield f'<path class="grid" d="M{x:.1f},{layout.top:.1f}V{layout.bottom + 4:.1f}"/>'
        yield (
            f'<text class="tick" x="{x:.1f}" y="{layout.bottom + 16:.1f}">{escape(format_time(tick, unit))}</text>'
        )


def _actions(timeline: Timeline, rows: Sequence[Row], layout: _Layout, unit: str | None) -> Iterator[str]:
    """A rectangle with a title per action, and its label where that fits."""
    height = layout.row_height
    for row, top in zip(rows, layout.tops, strict=False):
        several = len(np.unique(timeline.stages[row.actions])) > 1
        for index in row.actions.tolist():
            kind, microbatch = Kind(int(timeline.kinds[index])), int(timeline.microbatches[index])
            start, end = float(timeline.start[index]), float(timeline.end[index])
            name = action_name(timeline, index)
            x, width = layout.x(start), max(0.4, (end - start) * layout.scale)
            odd = " odd" if microbatch % 2 and microbatch > 0 else ""
            times = f"{format_time(start, unit)} to {format_time(end, unit)}"
            yield (
                f'<rect class="edge {kind.name}{odd}" x="{x:.2f}" y="{top:.1f}" width="{width:.2f}" '
                f'height="{height:g}"><title>{name} on {row.title}: {escape(times)}</title></rect>'
            )
            short = name.lstrip("0123456789")
            for label in (name, short) if several else (short,):
                if height >= 12 and len(label) * _CHARACTER + 3 <= width:
                    place = f'x="{x + 3:.1f}" y="{top + height / 2 + 4:.1f}"'
                    yield f'<text class="label on-{kind.name}" {place}>{label}</text>'
                    break


def _waiting(timeline: Timeline, rows: Sequence[Row], layout: _Layout, unit: str | None) -> Iterator[str]:
    """A thin bar in the middle of a row where it waits for a transfer."""
    row_of = _row_numbers(timeline, rows)
    lost = waits(timeline)
    for action, start, end in zip(lost.action.tolist(), lost.start.tolist(), lost.end.tolist(), strict=True):
        y = layout.tops[row_of[action]] + layout.row_height / 2
        times = f"{format_time(start, unit)} to {format_time(end, unit)}"
        yield (
            f'<path class="wait" d="M{layout.x(start):.2f},{y - 1.5:.1f}H{layout.x(end):.2f}v3'
            f'H{layout.x(start):.2f}z"><title>{action_name(timeline, action)} waits for a transfer: '
            f"{escape(times)}</title></path>"
        )


def _transfers(timeline: Timeline, rows: Sequence[Row], layout: _Layout, unit: str | None) -> Iterator[str]:
    """A line per transfer that takes time, from the edge of the sender's row to the receiver's."""
    row_of = _row_numbers(timeline, rows)
    first_row = {row.rank: number for number, row in reversed(list(enumerate(rows)))}
    sent = timeline.transfers
    columns = (sent.source, sent.to_rank, sent.start, sent.arrival, consumers(timeline))
    for source, rank, start, arrival, fed in zip(*(column.tolist() for column in columns), strict=True):
        if arrival <= start:
            continue
        here, there = row_of[source], row_of[fed] if fed >= 0 else first_row[rank]
        down = layout.tops[there] > layout.tops[here]
        from_y = layout.tops[here] + (layout.row_height if down else 0)
        to_y = layout.tops[there] + (0 if down else layout.row_height)
        back = "" if timeline.kinds[source] == Kind.F else " back"
        times = f"{format_time(start, unit)} to {format_time(arrival, unit)}"
        yield (
            f'<line class="transfer{back}" x1="{layout.x(start):.2f}" y1="{from_y:.1f}" '
            f'x2="{layout.x(arrival):.2f}" y2="{to_y:.1f}"><title>result of {action_name(timeline, source)} '
            f"to rank {rank}: {escape(times)}</title></line>"
        )


def _row_numbers(timeline: Timeline, rows: Sequence[Row]) -> list[int]:
    numbers = np.zeros(len(timeline.kinds), np.int64)
    for number, row in enumerate(rows):
        numbers[row.actions] = number
    result: list[int] = numbers.tolist()
    return result


def _shares(timeline: Timeline, rows: Sequence[Row], layout: _Layout) -> Iterator[str]:
    """Per row and kind one shape: how much of each stretch of time the kind takes, stacked from below."""
    low, high = time_range(timeline)
    columns = max(1, int((high - low) * layout.scale / _SHARE_PIXELS))
    edges: Floats = np.linspace(layout.left, layout.x(high), columns + 1, dtype=np.float64)
    stacked = np.minimum(1.0, np.cumsum(fill_cells(timeline, rows, columns).share, axis=2))
    for number, (row, top) in enumerate(zip(rows, layout.tops, strict=False)):
        base = np.zeros(columns)
        for kind in LOOKS:
            level = stacked[number, :, int(kind)]
            count = int((timeline.kinds[row.actions] == kind).sum())
            if count:
                upper, lower = (np.round(top + layout.row_height * (1 - edge), 1) for edge in (level, base))
                name = f"{row.title}: {LOOKS[kind].name}, {count} actions"
                yield (
                    f'<path class="{kind.name}" d="{_outline(edges, upper, lower)}">'
                    f"<title>{escape(name)}</title></path>"
                )
            base = level


def _outline(edges: Floats, upper: Floats, lower: Floats) -> str:
    """The shape between two staircases, as path data; equal neighbouring steps are one."""

    def stairs(xs: Floats, ys: Floats) -> Iterator[str]:
        changes = np.flatnonzero(np.diff(ys)) + 1
        for change in changes.tolist():
            yield f"H{xs[change]:.1f}V{ys[change]:g}"

    start = f"M{edges[0]:.1f},{lower[0]:g}V{upper[0]:g}"
    there = "".join(stairs(edges, upper))
    turn = f"H{edges[-1]:.1f}V{lower[-1]:g}"
    back = "".join(stairs(edges[::-1], lower[::-1]))
    return f"{start}{there}{turn}{back}z"


def _notes(timeline: Timeline, unit: str | None, merged: bool) -> list[str]:
    time = "time" if timeline.period is None else "steady time"
    notes = [f"{time} {format_time(timeline.time, unit)}", f"bubble {timeline.bubble:.1%}".replace("%", " %")]
    if merged:
        notes.append(f"{len(timeline.kinds)} actions, too many to draw: heights are shares of the time")
    return notes


def _legend(
    timeline: Timeline, layout: _Layout, kinds: Sequence[Kind], notes: Sequence[str], merged: bool
) -> tuple[list[str], float]:
    """The legend's elements and the height of the whole drawing, which it ends."""
    items: list[tuple[str, str]] = [
        (f'<rect class="{kind.name}" width="18" height="12"/>', f"{kind.name} {LOOKS[kind].name}")
        for kind in kinds
    ]
    if not merged and len(waits(timeline).action):
        items.append(('<path class="wait" d="M0,4.5H18v3H0z"/>', "waiting for a transfer"))
    if not merged and (timeline.transfers.arrival > timeline.transfers.start).any():
        items.append(('<path class="transfer" d="M0,1L18,11"/>', "transfer"))
    items.extend(("", note) for note in notes)
    drawn, x, y = [], _MARGIN, layout.bottom + _AXIS
    for sample, words in items:
        indent = 24 if sample else 0
        length = indent + len(words) * _CHARACTER + 18
        if x > _MARGIN and x + length > layout.right:
            x, y = _MARGIN, y + _LEGEND
        drawn.append(
            f'<g transform="translate({x:.1f},{y:.1f})">{sample}'
            f'<text x="{indent}" y="10">{escape(words)}</text></g>'
        )
        x += length
    return drawn, round(y + _LEGEND + _MARGIN / 2)
