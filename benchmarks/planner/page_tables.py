"""The tables of README.md, from result.json; `scripts/figures` puts them there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["partition", "pipedream", "search"]


def _result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("result.json").read_text(encoding="utf-8"))
    return found


def _timed(rows: list[dict[str, Any]]) -> str:
    lines = ["| layers | accelerators | seconds |", "|---|---|---|"]
    for row in rows:
        counts = row["accelerators"]
        counts = list(counts.values()) if isinstance(counts, dict) else counts
        words = (
            f"{counts[0]} alike" if len(counts) == 1 else f"{'+'.join(map(str, counts))} of {len(counts)} types"
        )
        lines.append(f"| {row['layers']} | {words} | {row['seconds']:.2g} |")
    return "\n".join(lines)


def partition() -> str:
    return _timed(_result()["partition"])


def search() -> str:
    return _timed(_result()["search"])


def pipedream() -> str:
    lines = ["| layers | straight: ours, theirs, ratio | with replicas: ours, theirs, ratio |", "|---|---|---|"]
    rows = _result()["pipedream"]
    for layers in dict.fromkeys(row["layers"] for row in rows):
        cells = [
            f"{row['bapipe']:.3f} s, {row['pipedream']:.2g} s, {row['ratio']:.0f}x"
            for row in rows
            if row["layers"] == layers
        ]
        lines.append(f"| {layers} | {' | '.join(cells)} |")
    return "\n".join(lines)
