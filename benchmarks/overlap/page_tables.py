"""The tables of README.md, from result.json; `scripts/figures` puts them there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tables import LEAN, PAIRS, SHIPPED, SNO, SO, ZB_H1, ZERO_BUBBLE

__all__ = ["overheads", "transfers"]


def _result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(__file__).with_name("result.json").read_text(encoding="utf-8"))
    return found


def _torch(case: dict[str, Any], *, whole: bool) -> float:
    """The time of torch's best schedule, of those that run backwards whole or of all."""
    return min(
        about["median"]
        for name, about in case["systems"].items()
        if name.startswith("torch") and not (whole and name == ZERO_BUBBLE)
    )


def transfers() -> str:
    """What is claimed where a transfer takes half a forward and more."""
    cases = _result()["overlap"]["cases"][1:]
    so = [case["systems"][SO]["median"] for case in cases]
    off = {name: [abs(case["systems"][name]["error"]) for case in cases] for name in (SNO, SO)}
    speed = [case["systems"][SHIPPED]["median"] / own for case, own in zip(cases, so, strict=True)]
    best = [own / _torch(case, whole=True) for case, own in zip(cases, so, strict=True)]
    sizes = ", ".join(f"{1e3 * case['transfer']:.1f}" for case in cases)
    lines = [f"| claim | limit | SR {sizes} ms | held |", "|---|---|---|---|"]
    for name, words, limit in ((SNO, "SNO", 0.06), (SO, "SO", 0.08)):
        reached = ", ".join(f"{100 * value:.1f}" for value in off[name])
        held = "yes" if max(off[name]) <= limit else "no"
        lines.append(f"| {words} off its simulation | {100 * limit:.0f} % | {reached} % | {held} |")
    reached = ", ".join(f"{value:.2f}" for value in speed)
    lines.append(
        f"| SO's speed over `Schedule1F1B` | 1.4x | {reached}x | {'yes' if min(speed) >= 1.4 else 'no'} |"
    )
    lines.append(f"| SO's time over torch's best whole backward | – | {', '.join(f'{v:.3f}' for v in best)} | |")
    return "\n".join(lines)


def _overhead(part: dict[str, Any]) -> Iterator[tuple[str, str, float]]:
    systems = {LEAN if name.startswith(f"{LEAN} ") else name: about for name, about in part["systems"].items()}
    alone = systems["alone"]["thread"]
    for ours, theirs in PAIRS:
        yield ours, theirs, (systems[ours]["thread"] - alone) / (systems[theirs]["thread"] - alone)


def overheads() -> str:
    """What is claimed where a transfer takes no time, and of the CPU time of an action."""
    result = _result()
    case = result["overlap"]["cases"][0]
    so, zero = case["systems"][SO]["median"], case["systems"][ZB_H1]["median"]
    whole, best = _torch(case, whole=True), _torch(case, whole=False)
    simple, general = [], []
    for part in result["overhead"]:
        ratios = list(_overhead(part))
        first = [f"{value:.2f}" for _, _, value in ratios[:2]]
        rest = [value for _, _, value in ratios[2:]]
        simple.append(f"{', '.join(first)} on {part['ranks']}")
        general.append(f"{min(rest):.2f} to {max(rest):.2f} on {part['ranks']}")
    return "\n".join(
        [
            "| claim | limit | reached |",
            "|---|---|---|",
            f"| SO's time over torch's best whole backward, SR ≈ 0 | 1 | {so / whole:.3f} |",
            f"| SO's time over torch's best of all, SR ≈ 0 | 1 | {so / best:.3f}; our zb-h1: {zero / best:.3f} |",
            f"| overhead over torch's general runtime | 0.6 | {'; '.join(general)} ranks |",
            f"| overhead over its `Schedule1F1B`, `ScheduleGPipe` | 0.6 | {'; '.join(simple)} ranks |",
        ]
    )
