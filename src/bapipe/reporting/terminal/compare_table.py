"""Predicted beside measured, as tables and sentences for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table

from bapipe.analysis.link_estimate import LinkEstimate
from bapipe.analysis.predicted_measured import Comparison, MemoryPair, Pair, StageComparison
from bapipe.analysis.recalibrate import Recalibration
from bapipe.units import format_bandwidth, format_bytes, format_seconds

__all__ = ["comparison_notes", "comparison_tables", "correction_table"]

_NOTHING = 1e-9
"""seconds that two sums of the same times may differ by"""
_PAIRS_IN_A_TABLE = 2
"""so that it fits into a terminal of 80 columns"""


def comparison_tables(comparison: Comparison) -> list[Table]:
    """Tables of a row per stage and rank, then one of a row per rank."""
    stages = comparison.stages
    one_each = all(row.stage == row.rank for row in stages)
    shared = len({row.rank for row in stages}) < len(stages)
    figures: list[tuple[str, Callable[[StageComparison], Pair | None]]] = [
        ("forward", lambda row: row.forward),
        ("backward", lambda row: row.backward),
        ("optimizer of the rank" if shared else "optimizer", lambda row: row.update),
        ("recompute", lambda row: row.recompute),
        ("input gradient", lambda row: row.input_gradient),
        ("weight gradient", lambda row: row.weight_gradient),
        ("all-reduce", lambda row: row.all_reduce),
    ]
    shown = [(name, figure) for name, figure in figures if any(figure(row) is not None for row in stages)]
    tables = []
    for first in range(0, len(shown), _PAIRS_IN_A_TABLE):
        part = shown[first : first + _PAIRS_IN_A_TABLE]
        title = f"{comparison.schedule}: predicted → measured (error of the prediction)" if first == 0 else None
        names = ["stage", *(() if one_each else ("rank",)), *(name for name, _ in part)]
        table = _table(title, [*names, *(("in flight",) if first == 0 else ())])
        for row in stages:
            cells = [str(row.stage), *(() if one_each else (str(row.rank),))]
            cells += [_seconds(figure(row)) for _, figure in part]
            table.add_row(*cells, *((_counts(row.in_flight),) if first == 0 else ()))
        tables.append(table)
    return [*tables, _rank_table(comparison, one_each)]


def _rank_table(comparison: Comparison, one_each: bool) -> Table:
    names = ["rank", *(() if one_each else ("stages",)), "busy", "waits for transfers", "bubble", "memory"]
    table = _table(None, names)
    for rank in sorted({row.rank for row in comparison.stages}):
        own = [row for row in comparison.stages if row.rank == rank]
        table.add_row(
            str(rank),
            *(() if one_each else (", ".join(str(row.stage) for row in own),)),
            _seconds(own[0].busy),
            _seconds(own[0].exposed),
            _share(own[0].bubble),
            _memory(own[0].memory),
        )
    return table


def comparison_notes(comparison: Comparison) -> list[str]:
    """The global batch as a whole, what the links took, and what the memory figures are."""
    notes = [
        f"step: {_seconds(comparison.step)}, the median of the run",
        f"its actions, first to last: {_seconds(comparison.time)}, bubble {_share(comparison.bubble)}",
        f"beside its actions: {_overhead(comparison.overhead)}",
    ]
    notes += [_link_note(estimate) for estimate in comparison.links]
    resident = [row.memory.measured for row in comparison.stages if row.memory.source == "resident"]
    known = [size for size in resident if size is not None]
    if known:
        notes.append(
            f"memory is predicted only: on CPUs a run sees whole processes, libraries included, here up to "
            f"{format_bytes(max(known))}"
        )
    return notes


def _overhead(pair: Pair) -> str:
    known = abs(pair.predicted) > _NOTHING
    return _seconds(pair) if known else f"{format_seconds(pair.measured)}, which the plan does not count"


def _link_note(estimate: LinkEstimate) -> str:
    where = f"{estimate.link} nodes" if estimate.link in ("within", "between") else estimate.link
    pair = Pair(predicted=estimate.predicted, measured=estimate.measured)
    link = estimate.corrected
    corrected = (
        "" if link is None else f"; corrected: {format_bandwidth(link.bandwidth)}, {format_seconds(link.latency)}"
    )
    count = f"median of {estimate.transfers} transfers" if estimate.transfers > 1 else "the only transfer"
    taken = f"{format_bytes(estimate.bytes)} take {_seconds(pair)}"
    return f"link {where}: {taken}, {count} that a rank waited for{corrected}"


def correction_table(found: Recalibration) -> Table:
    """A row per accelerator type and stage: by what its layers' times were multiplied."""
    table = _table("recalibrated: measured / predicted", ["type", "stage", "forward", "backward", "optimizer"])
    for row in found.corrections:
        update = "–" if row.update is None else f"×{row.update:.3f}"
        table.add_row(row.accelerator, str(row.stage), f"×{row.forward:.3f}", f"×{row.backward:.3f}", update)
    return table


def _table(title: str | None, names: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name, justify="right")
    return table


def _seconds(pair: Pair | None) -> str:
    if pair is None:
        return "–"
    error = "" if pair.error is None else f" ({pair.error:+.0%})"
    return f"{_joined(format_seconds(pair.predicted), format_seconds(pair.measured))}{error}"


def _joined(predicted: str, measured: str) -> str:
    """ "2 ms" and "3 ms" -> "2 → 3 ms"."""
    number, _, unit = predicted.partition(" ")
    return f"{number if measured.endswith(f' {unit}') else predicted} → {measured}"


def _share(pair: Pair) -> str:
    return f"{pair.predicted * 100:.1f} → {pair.measured:.1%}"


def _counts(pair: Pair) -> str:
    return f"{pair.predicted:g} → {pair.measured:g}"


def _memory(pair: MemoryPair) -> str:
    if pair.measured is None or pair.source != "allocated":
        return f"{format_bytes(pair.predicted)} → –"
    return f"{_joined(format_bytes(pair.predicted), format_bytes(pair.measured))} ({pair.error:+.0%})"
