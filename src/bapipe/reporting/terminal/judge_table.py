"""A split by hand beside the best plan, as a table and sentences for a terminal."""

from __future__ import annotations

from collections.abc import Callable

from rich.table import Table

from bapipe.analysis.judge_split import Judged, Judgement
from bapipe.units import format_bytes, format_seconds

__all__ = ["judgement_notes", "judgement_table"]


def judgement_table(found: Judgement) -> Table:
    """A row per figure, a column for either."""
    table = Table(title_justify="left")
    for header in ("", "given", "best plan"):
        table.add_column(header, justify="right" if header else "left", overflow="fold")
    for name, text in _ROWS.items():
        table.add_row(name, text(found.given), text(found.best))
    return table


def _listed(values: tuple[int, ...]) -> str:
    return " ".join(map(str, values if len(values) <= 16 else values[:15])) + (" …" if len(values) > 16 else "")


_ROWS: dict[str, Callable[[Judged], str]] = {
    "time of a step": lambda one: format_seconds(one.time),
    "samples per second": lambda one: f"{one.throughput:.4g}",
    "bubble": lambda one: f"{one.bubble:.1%}",
    "fullest accelerator": lambda one: format_bytes(one.memory),
    "slowest stage": lambda one: f"{one.bottleneck}: {format_seconds(max(one.seconds))}",
    "micro-batches": lambda one: f"{one.microbatches} of {one.microbatch}",
    "layers per stage": lambda one: _listed(one.layers),
}


def judgement_notes(found: Judgement) -> list[str]:
    """What the figures say."""
    given, best = found.given, found.best
    pace = f"{found.longer:.1%} longer than" if found.longer >= 0.0005 else "as long as"
    notes = [f"a step of the given split is {pace} one of the best plan ({best.name})"]
    first, last = found.bottleneck_layers
    mean = sum(given.seconds) / len(given.seconds)
    over = max(given.seconds) / mean - 1 if mean else 0.0
    notes.append(
        f"its slowest stage is {given.bottleneck} ({first} to {last}), {over:.0%} above the mean of its stages"
    )
    notes += [_short(one) for one in (given,) if one.short]
    return notes


def _short(one: Judged) -> str:
    return f"it does not fit: an accelerator lacks {format_bytes(one.short)}"
