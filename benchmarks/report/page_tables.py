"""The table of README.md, from result.json; `scripts/figures` puts it there."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["pans"]


def pans() -> str:
    cases = json.loads(Path(__file__).with_name("result.json").read_text(encoding="utf-8"))["cases"]
    lines = [
        "| stages × micro-batches | actions | in view | draw | draw and paint | worst | rectangles or cells |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        for view, pan in case["pans"].items():
            drawn = max(pan["rects"], pan["cells"])
            lines.append(
                f"| {case['case']} | {case['actions']:,} | {view} | {pan['draw_ms']:.1f} ms | "
                f"{pan['paint_ms']:.1f} ms | {pan['worst_ms']:.1f} ms | {drawn:,} |"
            )
    return "\n".join(lines)
