"""From what was measured to rows and the summary; from result.json to the tables of README.md. Uses no torch."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from contenders import SETTINGS, Setting  # noqa: E402

from models import MODELS  # noqa: E402

__all__ = ["failed_rows", "measured_rows", "result_of", "totals"]

WARM = 2
"""steps of a run that are not timed, one where few are left"""
CLOSE = 0.02
"""share by which the automatic plan may be slower than another of ours and still count as the fastest"""


def result_of(rows: dict[str, Any], environment: dict[str, Any], *, tiny: bool) -> dict[str, Any]:
    """What is committed: a row for each contender of each setting, settings with their ratios, and the summary."""
    told, settings = [], []
    for setting in SETTINGS:
        size, count = MODELS[setting.model].batch(tiny=tiny)
        own = {}
        for words, contender in setting.contenders().items():
            row = rows.get(f"{setting.name} {words}")
            if row is not None:
                own[words] = _row(setting, words, row, size * count, peer=contender.is_peer)
        told += list(own.values())
        if own:
            settings.append(_compared(setting, own))
    return {
        "environment": environment,
        **({"rehearsal": True} if tiny else {}),
        "summary": _summary(settings, told),
        "settings": settings,
        "rows": told,
    }


def _row(setting: Setting, words: str, row: dict[str, Any], samples: int, *, peer: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"setting": setting.name, "contender": words, "peer": peer}
    runs = row.get("runs", [])
    if not runs:
        return found | {"error": row.get("error", "not run")}
    medians = [median(_timed(run["seconds"])) for run in runs]
    seconds = median(medians)
    peaks = [max((run["memory"][rank] or 0) for run in runs) for rank in range(len(runs[0]["memory"]))]
    found |= {
        "samples_per_second": samples / seconds,
        "seconds": seconds,
        "runs": medians,
        "spread": max(medians) / min(medians) - 1,
        "schedule": row["schedule"],
        "stages": row.get("stages"),
        "compiled": row["compiled"],
        "transport": runs[-1].get("transport", "nccl"),
        "peaks": peaks,
        "peak": max(peaks),
        "losses": runs[-1]["losses"],
    }
    if "error" in row:
        found["later_error"] = row["error"]
    if "predicted" in row:
        shares = [one / other - 1 for one, other in zip(row["predicted_memory"], peaks, strict=True) if other]
        found |= {
            "kind": row["kind"],
            "predicted": samples / row["predicted"],
            "time_error": row["predicted"] / seconds - 1,
            "predicted_peaks": row["predicted_memory"],
            "predicted_peak": max(row["predicted_memory"]),
            "memory_error": max(shares, key=abs, default=None),
        }
    return found


def _timed(seconds: list[float]) -> list[float]:
    return seconds[WARM:] if len(seconds) > WARM + 1 else seconds[1:] or seconds


def _compared(setting: Setting, own: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The automatic plan by NCCL beside the best peer and beside the others of ours."""
    ran = {words: row for words, row in own.items() if "error" not in row}
    peers = {words: row["samples_per_second"] for words, row in ran.items() if row["peer"]}
    best = max(peers, key=lambda words: peers[words], default=None)
    found: dict[str, Any] = {"setting": setting.name, "best_peer": best}
    found["best_peer_rate"] = None if best is None else peers[best]
    claim, other = ran.get("ours nccl"), ran.get("ours auto")
    if claim is None:
        return found
    found |= {"automatic": claim["schedule"], "kind": claim["kind"], "rate": claim["samples_per_second"]}
    found["ratio"] = None if best is None else claim["samples_per_second"] / peers[best]
    found["own_transport_rate"] = None if other is None else other["samples_per_second"]
    found["own_transport_ratio"] = (
        None if other is None or best is None else other["samples_per_second"] / peers[best]
    )
    others = {words: row for words, row in ran.items() if words.startswith("ours nccl ")}
    if others:
        fastest = max(others.values(), key=lambda row: float(row["samples_per_second"]))
        allowed = max(CLOSE, claim["spread"], fastest["spread"])
        share = claim["samples_per_second"] / fastest["samples_per_second"]
        found |= {"automatic_fastest": share >= 1 - allowed, "to_the_best_other": share}
    return found


def _summary(settings: list[dict[str, Any]], rows: list[dict[str, Any]]) -> dict[str, Any]:
    known = [own for own in settings if own.get("ratio") is not None]
    pipelines = [own["ratio"] for own in known if own["kind"] != "data-parallel"]
    others = [own["ratio"] for own in known if own["kind"] == "data-parallel"]
    ours = [row for row in rows if "time_error" in row]
    return {
        "settings": len(known),
        "pipelines": len(pipelines),
        "pipeline_geometric_mean": geometric_mean(pipelines) if pipelines else None,
        "others": len(others),
        "others_least": min(others, default=None),
        "automatic_fastest": sum(own.get("automatic_fastest", False) for own in known),
        "automatic_compared": sum("automatic_fastest" in own for own in known),
        "worst_time_error": max((row["time_error"] for row in ours), key=abs, default=None),
        "worst_memory_error": max(
            (row["memory_error"] for row in ours if row["memory_error"] is not None), key=abs, default=None
        ),
        "failed": sum("error" in row for row in rows),
    }


def _result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "result.json").read_text(encoding="utf-8"))
    return found


def _figure(value: float | None, spec: str) -> str:
    return "–" if value is None or not math.isfinite(value) else format(value, spec).replace("%", " %")


def totals() -> str:
    """For README.md: a line for each setting."""
    lines = [
        "| setting | automatic plan | samples/s | best peer | samples/s | ratio | own transport | ours fastest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for own in _result().get("settings", []):
        fastest = {True: "yes", False: "no", None: "–"}[own.get("automatic_fastest")]
        lines.append(
            f"| {own['setting']} | {own.get('automatic', '–')} | {_figure(own.get('rate'), '.1f')} | "
            f"{own['best_peer'] or '–'} | {_figure(own['best_peer_rate'], '.1f')} | "
            f"{_figure(own.get('ratio'), '.3f')} | {_figure(own.get('own_transport_ratio'), '.3f')} | {fastest} |"
        )
    return "\n".join(lines) if len(lines) > 2 else "No setting has been run yet."


def measured_rows() -> str:
    """For README.md: a line for each row that ran."""
    lines = [
        "| setting | contender | schedule | samples/s | spread | predicted | off | peak | predicted | off |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in _result().get("rows", []):
        if "error" in row or "contender" not in row:
            continue
        sizes = [None if (size := row.get(key)) is None else size / 1e9 for key in ("peak", "predicted_peak")]
        lines.append(
            f"| {row['setting']} | {row['contender']} | {row['schedule']} | {row['samples_per_second']:.1f} | "
            f"{_figure(row['spread'], '.1%')} | {_figure(row.get('predicted'), '.1f')} | "
            f"{_figure(row.get('time_error'), '+.1%')} | {_figure(sizes[0], '.2f')} GB | "
            f"{_figure(sizes[1], '.2f')} GB | {_figure(row.get('memory_error'), '+.1%')} |"
        )
    return "\n".join(lines) if len(lines) > 2 else "No row has been run yet."


def failed_rows() -> str:
    """For README.md: a line for each row that did not run, and why."""
    rows = [row for row in _result().get("rows", []) if "error" in row]
    return "\n".join(f"- {row['setting']} {row['contender']}: {row['error']}" for row in rows) or "None so far."
