"""The tables of README.md and of the documentation, from result.json; `scripts/figures` puts them there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["bottlenecks", "efforts", "growth"]


def _result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("result.json").read_text(encoding="utf-8"))
    return found


def growth() -> str:
    """How samples/s and bubble go with the number of accelerators, and what planning takes."""
    lines = [
        "| network | accelerators | plan | samples/s | of linear | bubble | idle accelerators | planning, CPU s "
        "| peak MB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    first: dict[str, float] = {}
    for row in _result()["rows"]:
        name = row["case"].rpartition(", ")[0]
        each = row["samples_per_second"] / row["accelerators"]
        share = each / first.setdefault(name, each)
        lines.append(
            f"| {name} | {row['accelerators']} | {row['plan']} | {row['samples_per_second']:.4g} | "
            f"{100 * share:.0f} % | {100 * row['bubble']:.1f} % | {row['idle']} | {row['cpu_seconds']:.1f} | "
            f"{row['peak_megabytes']:.0f} |"
        )
    return "\n".join(lines)


def bottlenecks() -> str:
    """What twice as much of a resource saves of the time of a sample, on 1024 accelerators, planned again."""
    rows = [row for row in _result()["rows"] if row.get("saved_by_twice")]
    names = list(rows[0]["saved_by_twice"])
    lines = [f"| network | {' | '.join(names)} | next bottleneck |", "|---" * (len(names) + 2) + "|"]
    for row in rows:
        saved = row["saved_by_twice"]
        rest = {name: gain for name, gain in saved.items() if name != "compute"}
        most = max(rest, key=lambda name: rest[name])
        cells = " | ".join(f"{100 * saved[name]:.1f} %" for name in names)
        lines.append(f"| {row['case'].rpartition(', ')[0]} | {cells} | {most} |")
    return "\n".join(lines)


def efforts() -> str:
    """What a longer search gains over the usual one."""
    result = _result()
    usual = {row["case"]: row["samples_per_second"] for row in result["rows"]}
    lines = [
        "| network, accelerators | usual, samples/s | effort, s | samples/s | gain |",
        "|---|---|---|---|---|",
    ]
    for row in result["efforts"]:
        before, now = usual[row["case"]], row["samples_per_second"]
        lines.append(
            f"| {row['case']} | {before:.4g} | {row['effort']:g} | {now:.4g} | {100 * (now / before - 1):.2f} % |"
        )
    return "\n".join(lines)
