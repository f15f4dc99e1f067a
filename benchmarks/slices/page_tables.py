"""The tables of README.md and of the documentation, from result.json; `scripts/figures` puts them there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["choices", "errors", "largest"]

MODELS = {"gnmt-8": "GNMT-8", "vgg16": "VGG-16", "resnet50": "ResNet-50"}


def _result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("result.json").read_text(encoding="utf-8"))
    return found


def _equal(run: dict[str, Any], count: int) -> bool:
    """Whether a run is on so many equal slices, with links as they are."""
    return run["slices"] == count and len(set(run.get("percentages", [1]))) == 1 and not run.get("emulated")


def _newest(result: dict[str, Any], model: str, count: int, *cases: str) -> tuple[dict[str, Any], str] | None:
    """The newest row of the first of these cases that was measured, and its case."""
    for case in cases:
        for run in reversed(result["runs"]):
            for row in run["rows"]:
                if _equal(run, count) and (row["model"], row["case"]) == (model, case) and "measured" in row:
                    return row, case
    return None


def _pairs() -> Iterator[tuple[str, int]]:
    yield from ((model, count) for model in MODELS for count in (4, 8))


OTHERS = (("so", "sno"), ("gpipe-8",), ("pipedream",), ("dp",))
"""columns of `choices`, each the first case that was measured"""
TOLD = ("so", "sno", "gpipe-8", "pipedream", "auto", "zb-split", "uniform", "dp")
"""cases that today's planner makes or compares with; earlier ways to divide layers are in result.md alone"""


def choices() -> str:
    """Samples/s of the newest run of each case."""
    result = _result()
    lines = [
        "| samples/s | 1F1B-SO, no replicas | GPipe | PipeDream | data parallelism, accumulating "
        "| the automatic choice | over the best of the others | share of ideal |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model, count in _pairs():
        chosen = _newest(result, model, count, "auto")
        assert chosen is not None
        auto = chosen[0]
        cells, speeds = [], []
        for cases in OTHERS:
            item = _newest(result, model, count, *cases)
            if cases == ("dp",) and auto["schedule"] == "data-parallel":
                cells.append("the choice")
                continue
            assert item is not None
            row, case = item
            speeds.append(row["throughput"])
            cells.append(f"{row['throughput']:.0f}{' (1F1B-SNO)' if case == 'sno' else ''}")
        slice_speed = next(
            run["one_slice"][model]
            for run in reversed(result["runs"])
            if _equal(run, count) and model in run.get("one_slice", {})
        )
        ideal = count * slice_speed
        words = "data parallelism" if auto["schedule"] == "data-parallel" else auto["schedule"]
        words += ", split layers" if auto["split"] else ""
        lines.append(
            f"| {MODELS[model]}, {count} slices | {' | '.join(cells)} | **{auto['throughput']:.0f}** ({words}) | "
            f"{auto['throughput'] / max(speeds):.2f}x | {100 * auto['throughput'] / ideal:.1f} % of {ideal:.0f} |"
        )
    return "\n".join(lines)


def largest() -> str:
    """The largest GNMT-L that trained (Table IV)."""
    rows = _result()["largest"]
    alone = next(row["layers"] for row in rows if row["system"] == "DP" and row["slices"] == 1)
    names = {
        "DP": "data parallelism",
        "GPipe": "GPipe, without recomputation",
        "PipeDream": "PipeDream",
        "BaPipe": "BaPipe as in the paper: 1F1B-SNO, no recomputation",
        "BaPipe-free": "BaPipe as the planner chooses",
    }
    lines = ["| | 2 slices | 4 slices | 8 slices |", "|---|---|---|---|"]
    for system, words in names.items():
        cells = []
        for count in (2, 4, 8):
            layers = [row["layers"] for row in rows if (row["system"], row["slices"]) == (system, count)]
            cells.append(f"{layers[-1]} ({layers[-1] / alone:.1f})" if layers and layers[-1] else "–")
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _off(values: list[float]) -> str:
    low, high = f"{100 * min(values, default=0):+.1f}", f"{100 * max(values, default=0):+.1f}"
    return "" if not values else f"{low} %" if low == high else f"{low} to {high} %"


def _error_row(words: str, runs: list[dict[str, Any]], model: str | None) -> str:
    """Of the newest row of every case in these runs."""
    newest: dict[tuple[str, str], float] = {}
    for run in runs:
        for row in run["rows"]:
            if row["model"] == (model or row["model"]) and "measured" in row:
                newest[row["model"], row["case"]] = row["predicted"] / row["measured"] - 1
    kinds: dict[str, list[float]] = {"pipelines": [], "accumulating": [], "without": []}
    for (_, case), error in newest.items():
        if case.startswith("dp-"):
            kinds["without"].append(error)
        elif case in TOLD:
            kinds["accumulating" if case == "dp" else "pipelines"].append(error)
    return f"| {words} | {' | '.join(_off(values) for values in kinds.values())} |"


def errors() -> str:
    """Predicted / measured − 1."""
    runs = _result()["runs"]
    lines = [
        "| time | pipelines and automatic plans | data parallelism, accumulating | without |",
        "|---|---|---|---|",
    ]
    for model, count in _pairs():
        own = [run for run in runs if _equal(run, count)]
        lines.append(_error_row(f"{MODELS[model]}, {count} slices", own, model))
    unequal = [run for run in runs if len(set(run.get("percentages", [1]))) > 1]
    lines.append(_error_row("unequal slices", unequal, None))
    lines.append(_error_row("emulated links", [run for run in runs if run.get("emulated")], None))
    return "\n".join(lines)
