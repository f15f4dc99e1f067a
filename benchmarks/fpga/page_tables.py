"""The tables of README.md, from result.json; `scripts/figures` puts them there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["sensitivity", "speedups"]

DATA = ("paper-ddr", "greedy-on-chip", "batched-reuse")
NAMES = {"gradients once per 2 images": "a pass over DDR serves 2 images, for both"}


def _cases() -> list[dict[str, Any]]:
    result = json.loads(Path(__file__).with_name("result.json").read_text(encoding="utf-8"))
    cases: list[dict[str, Any]] = result["table6"]
    return cases


def speedups() -> str:
    lines = [f"| cluster | paper | {' | '.join(DATA)} | ρ = D/C of paper-ddr |", "|---|---|---|---|---|---|"]
    for row in _cases()[0]["rows"]:
        over = " | ".join(f"{row['over'][name]:.3f}" for name in DATA)
        ratio = ", ".join(f"{name} {value:.2f}" for name, value in row["ratio"].items())
        lines.append(f"| {row['cluster']} | {row['paper']:.2f} | {over} | {ratio} |")
    return "\n".join(lines)


def sensitivity() -> str:
    cases = _cases()
    lines = [f"| changed | {' | '.join(row['cluster'] for row in cases[0]['rows'])} |", "|---|---|---|---|"]
    for case in cases:
        cells = " | ".join(f"{row['speedup']:.3f} ({row['binds']})" for row in case["rows"])
        lines.append(f"| {NAMES.get(case['case'], case['case'])} | {cells} |")
    return "\n".join(lines)
