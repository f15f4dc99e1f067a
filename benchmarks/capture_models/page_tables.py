"""The tables of README.md, from result.json; `scripts/figures` puts them there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["refused", "totals"]


def _result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("result.json").read_text(encoding="utf-8"))
    return found


def totals() -> str:
    """How many types came to what."""
    found = _result()
    captured = [row for row in found["rows"] if row["outcome"] == "captured"]
    leaves = sum(row["leaf_modules"] > 0 for row in captured)
    fixed = sum(not row["any_batch"] for row in captured)
    return "\n".join(
        [
            "| types | captured | with leaf modules | one batch size | largest difference | refused | left out |",
            "|---|---|---|---|---|---|---|",
            f"| {found['types']} | {found['captured']} | {leaves} | {fixed} | {found['largest_difference']:.1e} | "
            f"{found['refused'] + found['failed']} | {found['left_out']} |",
        ]
    )


def refused() -> str:
    """The types that are not captured, and why."""
    rows = [row for row in _result()["rows"] if row["outcome"] in ("refused", "failed")]
    if not rows:
        return "None so far."
    return "\n".join(
        ["| type | why |", "|---|---|", *(f"| {row['type']} | {_cell(row['why'])} |" for row in rows)]
    )


def _cell(text: str) -> str:
    return text.partition("; ")[0].replace("|", "\\|")
