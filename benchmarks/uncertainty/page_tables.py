"""The tables of README.md, from the result files; `scripts/figures` puts them there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["choices", "choices_by_deviation", "limits", "limits_by_deviation"]


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return found


def _cells(row: dict[str, float]) -> str:
    return f"{100 * row['mean']:.2f} % | {100 * row['percentile_95']:.1f} % | {100 * row['worst']:.1f} %"


def choices() -> str:
    """Where truths lie within the errors."""
    return _choices("within.json")


def choices_by_deviation() -> str:
    """Where the errors are standard deviations."""
    return _choices("deviation.json")


def _choices(name: str) -> str:
    found = _read(name)
    first, more, last = found["runners"]
    names = {
        "nominal": "nominal: fastest by the measured times",
        "robust": "robust: least mean regret",
        "raced": f"raced: the fastest of {first:.1f} plans in the mean",
        "raced_again": f"raced again: and of {more:.1f} more that the first round's runs speak for",
        "raced_on": f"raced a third time: and of {last:.1f} more that the runs so far speak for",
    }
    lines = ["| choice | mean regret | 95th percentile | worst | best plan chosen |", "|---|---|---|---|---|"]
    lines += [
        f"| {words} | {_cells(found[key])} | {100 * found[key]['best_chosen']:.0f} % |"
        for key, words in names.items()
    ]
    return "\n".join(lines)


def limits() -> str:
    """Where truths lie within the errors."""
    return _limits("limits-within.json")


def limits_by_deviation() -> str:
    """Where the errors are standard deviations."""
    return _limits("limits-deviation.json")


def _limits(name: str) -> str:
    found = _read(name)["rules"]
    names = {
        "least mean regret": "by scenarios: least mean, which is what the planner chooses",
        **{
            f"least {rule}": f"by scenarios: least {rule}"
            for rule in ("root mean square", "mean and a fifth of the 95th percentile", "95th percentile")
        },
        "in hindsight, least mean regret": "in hindsight: least mean",
        "in hindsight, least worst regret": "in hindsight: least worst",
    }
    lines = ["| choice | mean regret | 95th percentile | worst |", "|---|---|---|---|"]
    return "\n".join([*lines, *(f"| {words} | {_cells(found[key])} |" for key, words in names.items())])
