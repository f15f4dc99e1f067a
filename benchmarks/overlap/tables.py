"""result.json as tables to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["write_tables"]

SNO, SO, GPIPE = "bapipe 1f1b-sno", "bapipe 1f1b-so", "bapipe gpipe"
LEAN = "bapipe 1f1b"
ZB_H1 = "bapipe zb-h1"
SHIPPED = "torch Schedule1F1B"
ZERO_BUBBLE = "torch ScheduleInterleavedZeroBubble"
PAIRS = (
    (SNO, SHIPPED),
    (GPIPE, "torch ScheduleGPipe"),
    (LEAN, "torch ScheduleInterleaved1F1B"),
    (GPIPE, "torch ScheduleLoopedBFS"),
    (ZB_H1, ZERO_BUBBLE),
)
"""the same order run by both (of zero bubble: two of a kind); the last three by torch's general runtime"""


def write_tables(result: dict[str, Any]) -> str:
    lines = ["# Overlap and overhead, as measured", "", *_environment(result), ""]
    overlap = result["overlap"]
    lines += [f"## Mini-batch, ms: medians of {overlap['repeats']}", "", *_overlap(overlap["cases"]), ""]
    lines += ["## Claims", "", *_claims(overlap["cases"]), "", _others(overlap), ""]
    for part in result["overhead"]:
        lines += [f"## Per action, µs: {part['ranks']} ranks, {part['microbatches']} micro-batches", ""]
        lines += [*_overhead(part["systems"]), "", _others(part), ""]
    return "\n".join(lines)


def _environment(result: dict[str, Any]) -> list[str]:
    about, settings = result["environment"], result["settings"]
    return [
        f"torch {about['torch']}, Python {about['python']}, {about['cores']} cores of {about['cpu']}.",
        f"{settings['ranks']} ranks, {settings['microbatches']} micro-batches, "
        f"F {1e3 * settings['forward']:g} ms, B {1e3 * settings['backward']:g} ms, "
        f"links of {settings['rate']} each way.",
    ]


def _others(part: dict[str, Any]) -> str:
    return f"Meanwhile other processes took {100 * part['others']:.0f} % of the machine's CPU time."


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def _overlap(rows: Sequence[dict[str, Any]]) -> list[str]:
    head = ["SR, as measured", *(f"{1e3 * row['transfer']:.2f} ms" for row in rows)]
    found = []
    for system in rows[0]["systems"]:
        cells = [system]
        for row in rows:
            about = row["systems"][system]
            cell = f"{1e3 * about['median']:.0f}"
            if about["simulated"] is not None:
                cell += f" (simulated {1e3 * about['simulated']:.0f}, {100 * about['error']:+.1f} %)"
            cells.append(cell)
        found.append(cells)
    return _table(head, found)


def _claims(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What is claimed of each message size, and what was reached."""
    head = [
        "SR, ms",
        "SNO off its simulation",
        "SO off its simulation",
        "SO's speed over torch's Schedule1F1B",
        "SO's time over torch's best whole backward",
        "SO's time over torch's best of all",
        "our best time over torch's best of all",
    ]
    found = []
    for row in rows:
        median = {name: about["median"] for name, about in row["systems"].items()}
        ours = [time for name, time in median.items() if name.startswith("bapipe")]
        torch = [time for name, time in median.items() if name.startswith("torch")]
        whole = [time for name, time in median.items() if name.startswith("torch") and name != ZERO_BUBBLE]
        found.append(
            [
                f"{1e3 * row['transfer']:.2f}",
                f"{100 * row['systems'][SNO]['error']:+.1f} %",
                f"{100 * row['systems'][SO]['error']:+.1f} %",
                f"{median[SHIPPED] / median[SO]:.2f}x",
                f"{median[SO] / min(whole):.3f}",
                f"{median[SO] / min(torch):.3f}",
                f"{min(ours) / min(torch):.3f}",
            ]
        )
    return _table(head, found)


def _overhead(systems: dict[str, Any]) -> list[str]:
    bare = systems["alone"]
    systems = {LEAN if name.startswith(f"{LEAN} ") else name: about for name, about in systems.items()}
    rows = [
        [name, *(f"{1e6 * about[key]:.0f}" for key in ("wall", "thread", "process"))]
        for name, about in systems.items()
    ]
    lines = _table(["system", "wall", "CPU of the rank's thread", "CPU with gloo's threads"], rows)
    ratios = []
    for ours, theirs in PAIRS:
        one, two = systems[ours], systems[theirs]
        cells = [f"{ours} / {theirs}"]
        cells += [f"{one[key] / two[key]:.2f}" for key in ("wall", "thread", "process")]
        cells += [f"{(one['thread'] - bare['thread']) / (two['thread'] - bare['thread']):.2f}"]
        ratios.append(cells)
    lines += ["", *_table(["ratio", "wall", "thread", "process", "thread, above the compute alone"], ratios)]
    return lines
