"""The tables of README.md, from result.json; `scripts/figures` puts them there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["brute_force", "pairs"]


def _result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("result.json").read_text(encoding="utf-8"))
    return found


def _table(name: str, total: tuple[str, int], outcomes: dict[str, int], columns: dict[str, str]) -> str:
    unknown = outcomes.keys() - columns.keys()
    assert not unknown, f"no column for {unknown}"
    heads, cells = [total[0], *columns.values()], [total[1], *(outcomes.get(key, 0) for key in columns)]
    return "\n".join(
        [
            f"| | {' | '.join(heads)} |",
            "|---" * (len(heads) + 1) + "|",
            f"| {name} | {' | '.join(map(str, cells))} |",
        ]
    )


def brute_force() -> str:
    found = _result()["brute_force"]
    columns = {
        "equal": "equal",
        "faster": "faster than brute force",
        "only the planner's fits": "only the planner's fits",
        "neither fits": "neither fits",
        "refused wrongly": "refused wrongly",
        "slower": "slower",
    }
    return _table("against brute force", ("problems", found["problems"]), found["outcomes"], columns)


def pairs() -> str:
    found = _result()["monotone"]
    columns = {
        "monotone": "not slower",
        "neither fits": "neither fits",
        "accumulation does not fit": "accumulation does not fit",
        "slower": "slower",
    }
    return _table("against itself", ("pairs", found["checks"]), found["outcomes"], columns)
