"""What each engine took for the same plans, as a table for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from bapipe.units import format_seconds

__all__ = ["EngineRow", "engine_times_table"]

EngineRow = tuple[str, str, float | None, float | None]
"""plan, engine, seconds of a step and samples per second; None: it did not run"""


def engine_times_table(rows: Sequence[EngineRow]) -> Table:
    """A row per plan and engine; the last column sets it beside the first engine of the same plan."""
    table = Table(title_justify="left")
    for header in ("plan", "engine", "step", "samples/s", "relative"):
        table.add_column(header, justify="left" if header in ("plan", "engine") else "right", overflow="fold")
    first: Mapping[str, float] = {plan: speed for plan, _, _, speed in reversed(rows) if speed is not None}
    for plan, engine, seconds, speed in rows:
        if seconds is None or speed is None:
            table.add_row(plan, engine, "–", "–", "–")
        else:
            table.add_row(plan, engine, format_seconds(seconds), f"{speed:.4g}", f"{speed / first[plan]:.3f}")
    return table
