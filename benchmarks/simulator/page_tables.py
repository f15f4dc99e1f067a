"""The table of README.md, from result.json; `scripts/figures` puts it there."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["points"]


def points() -> str:
    rows = json.loads(Path(__file__).with_name("result.json").read_text(encoding="utf-8"))["points"]
    lines = [
        "| micro-batches | actions + transfers | simulate | new schedule | kernel | lowering | pure Python "
        "| simulate, per item |",
        "|---|---|---|---|---|---|---|---|",
    ]
    keys = ("simulate_ms", "simulate_new_schedule_ms", "kernel_ms", "lowering_ms", "simulate_pure_python_ms")
    for row in rows:
        items = row["actions"] + row["transfers"]
        cells = " | ".join(f"{row[key]['median']:.3g} ms" for key in keys)
        each = 1e6 * row["simulate_ms"]["median"] / items
        lines.append(f"| {row['microbatches']} | {items:,} | {cells} | {each:.0f} ns |")
    return "\n".join(lines)
