"""result.json -> result.md.

PYTHONPATH=src python3 benchmarks/slices/tables.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bapipe.reproduce.model_sizes import parameters

__all__ = ["all_tables", "largest_table", "result_table"]

_TOO_FAST = 1e13
"""bytes/s; a message that takes no longer than one of a few bytes"""


def all_tables(result: dict[str, Any]) -> str:
    """Every run of a collection, as result.json in this folder is one."""
    parts = [f"Environment: {result['environment']}", ""]
    for run in result["runs"]:
        parts.append(result_table(run))
        if run["note"]:
            parts.append(f"{run['note'][0].upper()}{run['note'][1:]}.\n")
    parts.append(largest_table(result["largest"]))
    return "\n".join(parts)


def largest_table(rows: list[dict[str, Any]]) -> str:
    """Table IV: the largest GNMT-L of each system on so many slices, and what it was trained for.

    `times DP` is in layers, over the largest of data parallelism on one slice.
    """
    alone = next(row["layers"] for row in rows if row["system"] == "DP" and row["slices"] == 1)
    lines = [
        "The largest GNMT-L that trained for three steps in 16 GB a slice (Table IV); BaPipe by 1F1B-SNO without "
        "recomputation as in the paper, BaPipe-free as the planner chooses.",
        "",
        "| system | slices | the planner's L | trained | parameters | times DP | ran out of memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        short = ", ".join(str(item["layers"]) for item in row["tried"] if item["outcome"] == "out of memory")
        system, count, planned, best = (row[key] for key in ("system", "slices", "predicted", "layers"))
        size = "" if best is None else f"{parameters(best) / 1e9:.2f} G"
        times = "" if best is None else f"{best / alone:.2f}"
        lines.append(f"| {system} | {count} | {planned} | {best or ''} | {size} | {times} | {short} |")
    return "\n".join(lines) + "\n"


def result_table(result: dict[str, Any]) -> str:
    """A row per case: predicted beside measured.

    `of ideal` is the share of as many times `one_slice`, the samples/s of a slice that trains the whole model
    with the others loaded; empty where that was not measured. `of free transfers` is the share of what the
    simulator says of the same plan with messages that take no time; empty where that was not noted.
    """
    links = result["links"]
    bandwidth = links.get("bandwidth", 0.0)
    rate = f"{bandwidth / 1e9:.1f} GB/s" if bandwidth < _TOO_FAST else "too fast to measure"
    reduced = f"all-reduce {links.get('all_reduce', 0) / 1e9:.2f} GB/s"
    if "all_reduce_loaded" in links:
        reduced += f" (beside compute {links['all_reduce_loaded'] / 1e9:.2f})"
    lines = ["A rehearsal on the CPU: its times mean nothing.", ""] if result.get("rehearsal") else []
    lines += [
        f"{_cut(result)} of {result['memory'] / 1e9:.0f} GB; "
        f"links {rate} and {links.get('latency', 0) * 1e6:.0f} µs, {reduced}, "
        f"{'emulated' if result.get('emulated') else 'as measured before the runs'}.",
        "",
        "| model | case | micro-batch | mini-batch | predicted, s | measured, s | error | samples/s | of ideal "
        "| of free transfers | memory, GB | error |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        if "error" in row:
            told = " ".join(row["error"].split())[:200].replace("|", "\\|")
            lines.append(f"| {row['model']} | {row['case']} | | | | {told} | | | | | | |")
            continue
        known = [size for size in row["memory_measured"] if size]
        fullest = f"{max(known) / 1e9:.2f}" if known else ""
        pairs = list(zip(row.get("memory_predicted", ()), row["memory_measured"], strict=False))
        off = max((predicted / measured - 1 for predicted, measured in pairs if measured), key=abs, default=None)
        own = result.get("one_slice", {}).get(row["model"])
        ideal = f"{row['throughput'] / (result['slices'] * own):.3f}" if own else ""
        free = row.get("free_transfers") if row["schedule"] != "data-parallel" else None
        share = f"{free / row['measured']:.3f}" if free else ""
        lines.append(
            f"| {row['model']} | {row['case']} ({row['schedule']}{', recomputing' if row['recompute'] else ''}) "
            f"| {row['microbatch']} | {row['global_batch']} | {row['predicted']:.3f} | {row['measured']:.3f} "
            f"| {row['predicted'] / row['measured'] - 1:+.1%} | {row['throughput']:.0f} | {ideal} "
            f"| {share} | {fullest} | {'' if off is None else f'{off:+.1%}'} |"
        )
    return "\n".join(lines) + "\n"


def _cut(result: dict[str, Any]) -> str:
    """How many slices there are, with their shares where these differ."""
    shares = result.get("percentages", ())
    unequal = ", ".join(f"{share:g}" for share in shares) if len(set(shares)) > 1 else ""
    return f"{result['slices']} slices" + (f" ({unequal} %)" if unequal else "")


if __name__ == "__main__":
    folder = Path(__file__).parent
    collection = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    (folder / "result.md").write_text(all_tables(collection), encoding="utf-8")
