"""Checkpoints that came to harm, by the hundred; README.md says what is claimed. Writes checkpoint_damage.json."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bapipe.io.files import dump_json, write_text

HERE = Path(__file__).resolve().parent
TESTS = HERE.parents[1] / "tests" / "distributed"
sys.path.insert(0, str(TESTS))

from checkpoint_corruptions import KINDS  # noqa: E402
from forked_ranks import read_results, start  # noqa: E402

LONGEST = 10.0
"""seconds that a load of so small a checkpoint may take; one that hangs takes more"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=600, help="checkpoints to harm")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="bapipe-damage-") as name:
        folder = Path(name)
        settings = {"count": options.count, "seed": options.seed}
        (folder / "count.json").write_text(json.dumps(settings), encoding="ascii")
        start(TESTS / "damage_worker.py", folder, seconds=300 + 3 * options.count)
        [ranks] = read_results(folder, [2])
    if any("error" in rank for rank in ranks):
        print(next(rank["error"] for rank in ranks if "error" in rank), file=sys.stderr)
        return 1
    first, second = (rank["loads"] for rank in ranks)
    wrong = [case for case, other in zip(first, second, strict=True) if problem(case, other)]
    outcomes = {kind: Counter(case["outcome"] for case in first if case["kind"] == kind) for kind in KINDS}
    result: dict[str, Any] = {
        "environment": {
            "python": platform.python_version(),
            "torch": version("torch"),
            "machine": platform.machine(),
            "system": platform.system(),
            "cores": os.cpu_count(),
        },
        "seed": options.seed,
        "cases": len(first),
        "seconds": round(time.perf_counter() - begun, 1),
        "longest_load_seconds": round(max(case["seconds"] for case in first), 3),
        "outcomes": {kind: dict(sorted(counts.items())) for kind, counts in outcomes.items()},
        "wrong": [{key: case[key] for key in ("kind", "what", "outcome", "error", "verified")} for case in wrong],
    }
    write_text(HERE / "checkpoint_damage.json", dump_json(result))
    print(f"{len(first)} checkpoints harmed with seed {options.seed}, {len(wrong)} of them with a wrong outcome")
    for kind, counts in result["outcomes"].items():
        print(f"  {kind:14} " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    print(f"the longest load took {result['longest_load_seconds']} s")
    return 1 if wrong else 0


def problem(case: dict[str, Any], other: dict[str, Any]) -> str | None:
    """What must not be: a silent load, an error that is not BaPipe's, ranks that differ, damage that verify does
    not see, a load that takes too long."""
    if case["outcome"] not in ("refused", "went back", "same"):
        return "it loaded other values, or raised what is no BaPipeError"
    if (case["outcome"], case["error"]) != (other["outcome"], other["error"]):
        return "the ranks differ"
    if "\n" in case["error"] or case["export"] not in ("refused", "same"):
        return "its message has several lines, or its export is wrong"
    newer = case["kind"] == "newer schema"
    if newer and case["outcome"] != "refused":
        return "a newer schema was not refused"
    if case["verified"] not in ("damaged", "whole"):
        return "verify raised"
    if case["outcome"] != "same" and not newer and case["verified"] != "damaged":
        return "verify did not see it"
    if case["seconds"] > LONGEST:
        return "it took too long"
    return None


if __name__ == "__main__":
    sys.exit(main())
