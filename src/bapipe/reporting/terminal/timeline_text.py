"""A Timeline drawn in characters, for a terminal.

    rank 0 │F0─F1─······B0════F2─B1════···B2════
    rank 1 │···F0─B0════F1─B1════F2─B2════······
           └┴──────────────┴──────────────┴──────
            0              5              10
    F── forward   B══ backward   · idle
    time 12, bubble 25.0 %, one column 0.333333

An action with room for it is drawn with its label, padded with its kind's own fill, so nothing rests on colour.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np
from rich.cells import cell_len, set_cell_size
from rich.style import Style
from rich.text import Text

from bapipe.errors import BaPipeError
from bapipe.reporting.drawing.action_styles import LOOKS
from bapipe.reporting.drawing.labels import format_time, printable, ticks
from bapipe.reporting.drawing.rows import Row, rows_of
from bapipe.reporting.drawing.time_cells import IDLE, WAITING, aligned_columns, fill_cells, time_range
from bapipe.schedule.actions import Kind
from bapipe.simulator.timeline import Timeline

__all__ = ["MIN_WIDTH", "render_text"]

MIN_WIDTH = 40
"""columns below which a drawing says nothing"""
_ROOMY = 60
"""columns from which a row's name is spelt out"""
_SHORT = {"forward": "fwd", "backward": "bwd", "all-reduce": "a-r"}
_STYLES = {kind: Style(color=look.ink, bgcolor=look.color) for kind, look in LOOKS.items()}
_FAINT = Style(dim=True)
_BOLD = Style(bold=True)

Piece = tuple[str, Style | None]


def render_text(
    timeline: Timeline,
    *,
    width: int,
    color: bool,
    title: str | None = None,
    unit: str | None = None,
    max_ranks: int = 32,
) -> Text:
    """Draw the timeline in at most `width` columns: a row per rank and lane, an axis, a legend.

    Every column shows what takes most of its time: an action's label and fill, its letter alone where it is
    too short, `~` where the rank waits for a transfer, `·` where it is idle for another reason. Where ranks
    hold several stages and every label has the room, labels name the stage: `2F0`. With more than `max_ranks`
    ranks the middle ones are left out. With color=False the text has no styles. Linear in the actions.

    unit "s": times are seconds; None: plain numbers.
    """
    if width < MIN_WIDTH:
        raise BaPipeError(f"a drawing needs at least {MIN_WIDTH} columns, got {width}; raise the width")
    if max_ranks < 2:
        raise BaPipeError(f"a drawing needs at least 2 ranks, got {max_ranks}; raise max_ranks")
    lines: list[list[Piece]] = [] if title is None else [[(_shortened(printable(title), width), _BOLD)]]
    low, high = time_range(timeline)
    if high <= low:
        lines.append([("no action takes any time: nothing to draw", None)])
        return _text(lines, width, color)

    takes_time = timeline.end > timeline.start
    rows = [row for row in rows_of(timeline) if not row.is_all_reduce or takes_time[row.actions].any()]
    half = max_ranks // 2
    left_out = range(max_ranks - half, timeline.num_ranks - half)
    shown = [row for row in rows if row.rank not in left_out]
    names = [_row_name(row, width) for row in shown]
    gutter = max(map(len, names)) + 1
    columns = aligned_columns(timeline, width - gutter - 1)
    cells = fill_cells(timeline, shown, columns)
    staged = _names_stages(timeline, rows, columns / (high - low))
    noted = not left_out
    for name, row, owners in zip(names, shown, cells.owner.tolist(), strict=True):
        if not noted and row.rank >= left_out.stop:
            lines.append([(_left_out(left_out, gutter), _FAINT)])
            noted = True
        lines.append([(f"{name:<{gutter}}│", None), *_drawn(timeline, row, owners, staged)])
    lines.extend(_axis(low, high, unit, columns, width, gutter))
    lines.extend(_wrapped(_legend(timeline, cells.owner), width))
    shortest = float((timeline.end - timeline.start)[takes_time].min())
    footer = _footer(timeline, unit, (high - low) / columns, shortest, width)
    lines.extend(_wrapped([[(item, None)] for item in footer], width, ", "))
    return _text(lines, width, color)


def _text(lines: Iterable[Sequence[Piece]], width: int, color: bool) -> Text:
    text = Text(no_wrap=True, overflow="crop")
    for number, line in enumerate(lines):
        assert sum(cell_len(piece) for piece, _ in line) <= width
        text.append("\n" if number else "")
        for piece, style in line[:-1] if line[-1][0].isspace() else line:
            text.append(piece, style if color else None)
    return text


def _shortened(text: str, width: int) -> str:
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def _row_name(row: Row, width: int) -> str:
    rank = f"rank {row.rank}" if width >= _ROOMY else f"{row.rank}"
    return f"{rank} {_SHORT.get(row.name, row.name)}".rstrip()


def _left_out(ranks: range, gutter: int) -> str:
    which = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}–{ranks[-1]}"
    return f"{'⋮':<{gutter}}⋮ {which} not drawn"


def _names_stages(timeline: Timeline, rows: Sequence[Row], scale: float) -> bool:
    """Whether labels name the stage: some rank holds several, and the shortest action has room for it.

    It is all or none, since `F3` with no room for a fill and `4F0` after it would read `F34F0`.
    """
    if not any(len(np.unique(timeline.stages[row.actions])) > 1 for row in rows):
        return False
    own = timeline.microbatches >= 0
    longest = len(f"{timeline.stages.max()}F{timeline.microbatches.max()}")
    return bool(((timeline.end - timeline.start)[own].min(initial=np.inf) * scale + 1e-6) >= longest + 1)


def _drawn(timeline: Timeline, row: Row, owners: Sequence[int], staged: bool) -> Iterable[Piece]:
    """A row's cells, neighbours of one owner together."""
    for owner, run in groupby(owners):
        length = sum(1 for _ in run)
        if owner == WAITING:
            yield "~" * length, None
        elif owner == IDLE:
            # Only compute that stands still is a bubble.
            yield (" " if row.is_all_reduce else "·") * length, _FAINT
        else:
            kind = Kind(int(timeline.kinds[owner]))
            microbatch = int(timeline.microbatches[owner])
            name = kind.name if microbatch < 0 else f"{kind.name}{microbatch}"
            name = f"{timeline.stages[owner]}{name}" if staged else name
            fitting = name if len(name) + staged <= length else kind.name
            yield fitting.ljust(length, LOOKS[kind].fill), _STYLES[kind]


def _axis(
    low: float, high: float, unit: str | None, columns: int, width: int, gutter: int
) -> Iterable[list[Piece]]:
    """The line under the rows and the times under it; a time without room is left out."""
    scale = columns / (high - low)
    # One column more than the rows, where there is room, for a tick at the very end.
    line, times = ["─"] * min(columns + 1, width - gutter - 1), " " * gutter
    for tick in ticks(high, max(2, columns // 10)):
        column = min(round((tick - low) * scale), len(line) - 1)
        label, place = format_time(tick, unit), gutter + 1 + column
        line[column] = "┴"
        if place > len(times) and place + len(label) <= width:
            times = times.ljust(place) + label
    yield [(" " * gutter + "└" + "".join(line), None)]
    yield [(times, None)]


def _legend(timeline: Timeline, owner: np.ndarray) -> Iterable[list[Piece]]:
    present = {int(kind) for kind in np.unique(timeline.kinds[timeline.end > timeline.start])}
    for kind, look in LOOKS.items():
        if kind in present:
            yield [(kind.name + 2 * look.fill, _STYLES[kind]), (f" {look.name}", None)]
    if (owner == IDLE).any():
        yield [("·", _FAINT), (" idle", None)]
    if (owner == WAITING).any():
        yield [("~", None), (" waiting for a transfer", None)]


def _footer(timeline: Timeline, unit: str | None, column: float, shortest: float, width: int) -> Iterable[str]:
    yield f"{'time' if timeline.period is None else 'steady time'} {format_time(timeline.time, unit)}"
    yield f"bubble {timeline.bubble:.1%}".replace("%", " %")
    items = [f"one column {format_time(column, unit)}"]
    if shortest < column:
        items.append("each showing what takes most of it")
    # The last goes on from the one before it, so they share a line where they can.
    whole = ", ".join(items)
    yield from [whole] if len(whole) <= width else items


def _wrapped(items: Iterable[list[Piece]], width: int, between: str = "   ") -> Iterable[list[Piece]]:
    """Items, as many on a line as fit."""
    line: list[Piece] = []
    used = 0
    for item in items:
        length = sum(len(piece) for piece, _ in item)
        if line and used + len(between) + length > width:
            yield line
            line, used = [], 0
        if line:
            line.append((between, None))
            used += len(between)
        line.extend(item)
        used += length
    if line:
        yield line
