"""A what-if in the terminal, as bars or a grid, and as a standalone SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from xml.sax.saxutils import escape

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from bapipe.analysis.what_if import Sweep, SweepAnswer, WhatIf
from bapipe.reporting.drawing.labels import printable, ticks
from bapipe.units import format_seconds

__all__ = ["render_what_if", "sides", "what_if_svg"]

_BAR, _LEAST_BAR = 24, 6
"""columns of the longest bar, where there is room and where there is not"""
_FRAME = 16
"""columns of the lines and spaces between five columns"""
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Okabe and Ito's, which people with any colour blindness tell apart"""


def render_what_if(found: WhatIf, *, title: str) -> RenderableType:
    """Batch time against the swept values, and what binds on each side."""
    table = _Bars(found, title) if len(found.sweeps) == 1 else _grid(found, title)
    return Group(table, *(Text(f"· {line}") for line in sides(found)))


def _times(found: WhatIf) -> list[float]:
    return [point.answer.time for point in found.points if point.answer.time is not None]


class _Bars:
    """A row for every value; bars get shorter before a plan's name is wrapped."""

    def __init__(self, found: WhatIf, title: str) -> None:
        self._found, self._title = found, title

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        (sweep,) = self._found.sweeps
        answers = [self._found.answer(index) for index in range(len(sweep.labels))]
        longest = max(_times(self._found), default=1.0)
        times = ["–" if answer.time is None else format_seconds(answer.time) for answer in answers]
        binds = [answer.binds if answer.time is None else answer.binds or "·" for answer in answers]
        texts = ((sweep.name, *sweep.labels), ("batch time", *times), ("binds", *binds))
        taken = sum(max(map(cell_len, column)) for column in texts)
        plans = max(cell_len(answer.plan) for answer in answers)
        room = options.max_width - taken - plans - _FRAME
        most = min(_BAR, max(_LEAST_BAR, room))
        table = Table(title=printable(self._title), title_justify="left")
        table.add_column(sweep.name, justify="right", no_wrap=True)
        for header in ("batch time", "", "binds", "plan"):
            right, wraps = header == "batch time", header == "plan"
            table.add_column(header, justify="right" if right else "left", no_wrap=not wraps, overflow="fold")
        for label, time, bind, answer in zip(sweep.labels, times, binds, answers, strict=True):
            bar = "" if answer.time is None else "█" * max(1, round(answer.time / longest * most))
            table.add_row(label, time, bar, bind, answer.plan)
        yield table


def _grid(found: WhatIf, title: str) -> Table:
    first, second = found.sweeps
    table = Table(title=printable(f"{title}: batch time and what binds"), title_justify="left")
    table.add_column(f"{first.name} ↓   {second.name} →", justify="right", no_wrap=True)
    for label in second.labels:
        table.add_column(label, justify="right")
    for column, label in enumerate(first.labels):
        cells = [found.answer(column, row) for row in range(len(second.labels))]
        table.add_row(label, *(_cell(cell) for cell in cells))
    return table


def _cell(answer: SweepAnswer) -> str:
    return f"– {answer.binds}" if answer.time is None else f"{format_seconds(answer.time)} {answer.binds}".rstrip()


def sides(found: WhatIf) -> Iterable[str]:
    """For each value of the second sweep, what binds at either end of the first."""
    first = found.sweeps[0]
    second: Sweep | None = found.sweeps[1] if len(found.sweeps) > 1 else None
    for row in range(1 if second is None else len(second.values)):
        where = "" if second is None else f"{second.name} {second.labels[row]}: "
        ends = dict.fromkeys((0, len(first.values) - 1))
        texts = [_side(first, end, found.answer(*((end,) if second is None else (end, row)))) for end in ends]
        yield where + "; ".join(texts)


def _side(sweep: Sweep, end: int, answer: SweepAnswer) -> str:
    where = f"at {sweep.name} {sweep.labels[end]}"
    if answer.time is None:
        return f"{where} memory binds: nothing fits"
    if not answer.binding:
        return f"{where} nothing alone binds"
    saved = ", ".join(f"{name} {gain:.1%}" for name, gain in answer.binding.items())
    verb = "bind" if " and " in answer.binds else "binds"
    return f"{where} {answer.binds} {verb} (twice as much saves: {saved})"


def what_if_svg(found: WhatIf, *, title: str, width: int = 820, height: int = 420) -> str:
    """Batch time over the first sweep, a line for each value of the second; markers tell what binds."""
    first = found.sweeps[0]
    second = found.sweeps[1] if len(found.sweeps) > 1 else None
    left, right, top, bottom = 70.0, width - 150.0, 50.0, height - 60.0
    low, high = first.values[0], first.values[-1]
    longest = max(_times(found), default=1.0)

    def x(value: float) -> float:
        return left + (right - left) * ((value - low) / (high - low) if high > low else 0.5)

    def y(time: float) -> float:
        return bottom - (bottom - top) * time / (longest * 1.05)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="bapipe-what-if" role="img" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}">',
        f"<title>{escape(printable(title))}</title>",
        "<style>.bapipe-what-if{font:12px sans-serif;fill:#1a1a1a}.bapipe-what-if .axis{stroke:#8a8a8a;fill:none}"
        ".bapipe-what-if .line{fill:none;stroke-width:2}</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{left:g}" y="24" font-size="15">{escape(printable(title))}</text>',
        f'<path class="axis" d="M{left:g},{top:g}V{bottom:g}H{right:g}"/>',
        f'<text x="{(left + right) / 2:g}" y="{height - 16}" text-anchor="middle">{escape(first.name)}</text>',
        f'<text x="{left:g}" y="{top - 8:g}" text-anchor="middle">batch time</text>',
    ]
    for tick in ticks(longest * 1.05, 6):
        parts.append(
            f'<path class="axis" d="M{left - 4:g},{y(tick):.1f}h4"/><text x="{left - 8:g}" y="{y(tick) + 4:.1f}" '
            f'text-anchor="end">{escape(format_seconds(tick) if tick else "0")}</text>'
        )
    step = max(1, len(first.values) // 6)
    for value, label in list(zip(first.values, first.labels, strict=True))[::step]:
        parts.append(
            f'<path class="axis" d="M{x(value):.1f},{bottom:g}v4"/>'
            f'<text x="{x(value):.1f}" y="{bottom + 18:g}" text-anchor="middle">{escape(label)}</text>'
        )
    for row in range(1 if second is None else len(second.values)):
        color = _COLORS[row % len(_COLORS)]
        answers = [found.answer(*((i,) if second is None else (i, row))) for i in range(len(first.values))]
        parts.extend(_line(first, answers, color, x, y, None if second is None else second.labels[row]))
    return "\n".join([*parts, "</svg>", ""])


def _line(
    sweep: Sweep,
    answers: Sequence[SweepAnswer],
    color: str,
    x: Callable[[float], float],
    y: Callable[[float], float],
    name: str | None,
) -> list[str]:
    drawn = [
        (x(value), y(answer.time), label, answer)
        for value, label, answer in zip(sweep.values, sweep.labels, answers, strict=True)
        if answer.time is not None
    ]
    if not drawn:
        return []
    path = "L".join(f"{px:.1f},{py:.1f}" for px, py, _, _ in drawn)
    parts = [f'<path class="line" stroke="{color}" d="M{path}"/>']
    for px, py, label, answer in drawn:
        tip = f"{sweep.name} {label}: {format_seconds(answer.time or 0.0)}"
        tip += f", {answer.binds} binds" if answer.binds else ""
        tip += f"; {answer.plan}"
        parts.append(
            f'<g fill="{color}" transform="translate({px:.1f},{py:.1f})">{_marker(answer.binds)}'
            f"<title>{escape(tip)}</title></g>"
        )
    changes = [
        index for index in range(len(drawn)) if index == 0 or drawn[index][3].binds != drawn[index - 1][3].binds
    ]
    for index in changes:
        px, py, _, answer = drawn[index]
        if answer.binds:
            parts.append(f'<text x="{px + 6:.1f}" y="{py - 8:.1f}">{escape(answer.binds)}</text>')
    if name is not None:
        px, py = drawn[-1][:2]
        parts.append(f'<text x="{px + 10:.1f}" y="{py + 4:.1f}" style="fill:{color}">{escape(name)}</text>')
    return parts


def _marker(binds: str) -> str:
    """A disc for compute, a square for memory and DDR, a diamond for links."""
    leading = binds.partition(" ")[0]
    if leading in ("DDR", "RAM", "memory"):
        return '<rect x="-4" y="-4" width="8" height="8"/>'
    if leading == "link":
        return '<path d="M0,-5L5,0L0,5L-5,0z"/>'
    return '<circle r="4"/>'
