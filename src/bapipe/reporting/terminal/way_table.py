"""Stages as captured beside stages compiled, for --explain: what each way's best plans take."""

from __future__ import annotations

from rich.table import Table

from bapipe.costs.profile_ways import way_words
from bapipe.planner.evaluate import Evaluation
from bapipe.planner.search import Exploration
from bapipe.units import format_bytes, format_seconds

__all__ = ["render_ways"]


def render_ways(found: Exploration) -> Table:
    """A row per way: its best plan, and the best ones whose backward is whole and split."""
    table = Table(title="stages as captured or compiled: seconds of a global batch", title_justify="left")
    for header in ("stages", "best plan", "time", "whole backward", "split backward", "memory"):
        table.add_column(header, justify="left" if header in ("stages", "best plan") else "right", overflow="fold")
    for own in (found, found.other_way):
        if own is None:
            continue
        name = way_words(compiled=own.compiled) + (" (chosen)" if own is found else "")
        candidate = own.best.candidate
        table.add_row(
            name,
            f"{candidate.label}, micro-batch {candidate.chain.microbatch}",
            format_seconds(own.best.time),
            _fastest(own, split=False),
            _fastest(own, split=True),
            format_bytes(max(own.best.memory)),
        )
    return table


def _fastest(found: Exploration, *, split: bool) -> str:
    """Seconds of the best plan that fits and has a split backward on some stage, or on none."""
    times = [own.time for own in found.considered if own.short is None and _splits(own) == split]
    return format_seconds(min(times)) if times else "–"


def _splits(evaluation: Evaluation) -> bool:
    return bool(evaluation.schedule.parted_stages())
