"""A reproduced table in the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table as Grid
from rich.text import Text

from bapipe.reproduce.table_cells import Cell, Figure, Table

__all__ = ["markdown_page", "render_table"]

_HEAD = """# The paper's tables, reproduced

Made by `bapipe reproduce all --markdown docs/reproduction.md`; a test compares this page with a fresh run.
`bapipe reproduce all --check` fails if a figure leaves its limit. Nothing here ran on an accelerator: the figures
are the planner's, the simulator's and the memory model's. What was measured on slices of one GPU is shown beside
them by `--measured` and described in [benchmarks/slices](../benchmarks/slices/README.md).

**fitted** marks figures that a constant was calibrated on (or that are 1 by definition); all others are predicted.
Errors are ours / paper − 1. A figure without a limit is shown as it comes out; where that is far off, the remarks
below the table say why.
"""


def _number(value: float) -> str:
    if abs(value) >= 1e4:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _figure(value: Figure, *, missing: str = "–") -> str:
    if value is None:
        return missing
    return value if isinstance(value, str) else _number(value)


def _ours(cell: Cell) -> str:
    return _figure(cell.ours, missing="not measured")


def _error(cell: Cell) -> str:
    error = cell.error
    if error is None:
        return "–"
    if isinstance(cell.paper, str):
        return "same" if error == 0 else "differs"
    return "0" if error == 0 else f"{error:+.2%}" if abs(error) < 0.001 else f"{error:+.1%}"


def _limit(cell: Cell) -> str:
    if cell.limit is None:
        return "–"
    if cell.limit == 0:
        return "exact"
    if cell.absolute:
        return f"±{_number(cell.limit)}"
    return f"±{cell.limit:.0%}"


def _style(cell: Cell) -> str:
    if cell.limit is None:
        return ""
    return "green" if cell.holds else "bold red"


def render_table(table: Table, extra: Sequence[Cell] = ()) -> RenderableType:
    """The table for a terminal; `extra` cells, such as measured ones, follow in a grid of their own."""
    parts: list[RenderableType] = [Text(table.title, style="bold"), _grid(table.cells)]
    if extra:
        parts += [Text("measured on slices of one GPU", style="bold"), _grid(extra)]
    parts += [Text(f"· {note}") for note in table.notes]
    return Group(*parts, Text(""))


def _grid(cells: Iterable[Cell]) -> Grid:
    grid = Grid(box=SIMPLE_HEAD, pad_edge=False)
    for header, right in (
        ("row", False), ("column", False), ("paper", True), ("ours", True), ("error", True), ("limit", True),
        ("", False),
    ):  # fmt: skip
        grid.add_column(
            header, justify="right" if right else "left", overflow="fold", no_wrap=right, min_width=len(header)
        )
    before = ""
    for cell in cells:
        grid.add_row(
            escape(cell.row if cell.row != before else ""),
            escape(cell.column),
            _figure(cell.paper),
            _ours(cell),
            Text(_error(cell), style=_style(cell)),
            _limit(cell),
            "fitted" if cell.calibrated else "",
        )
        before = cell.row
    return grid


def markdown_page(tables: Iterable[Table]) -> str:
    """docs/reproduction.md."""
    return "\n".join([_HEAD, *(_markdown(table) for table in tables)])


def _markdown(table: Table) -> str:
    lines = [
        f"## {table.title}",
        "",
        "| row | column | paper | ours | error | limit | |",
        "|---|---|---|---|---|---|---|",
    ]
    for cell in table.cells:
        mark = "fitted" if cell.calibrated else ""
        figures = (cell.row, cell.column, _figure(cell.paper), _ours(cell), _error(cell), _limit(cell), mark)
        lines.append(f"| {' | '.join(figures)} |")
    if table.constants:
        lines += ["", "| constant | value | | source |", "|---|---|---|---|"]
        for item in table.constants:
            kind = "calibrated" if item.calibrated else "given"
            lines.append(f"| {item.name} | {item.value} | {kind} | {item.source} |")
    lines.append("")
    lines += [f"- {'Holds' if claim.holds else '**Does not hold**'}: {claim.text}." for claim in table.claims]
    lines += [f"- {remark[0].upper()}{remark[1:]}." for remark in table.remarks]
    return "\n".join([*lines, ""])
