"""The planner against brute force, and against itself on easier problems: writes result.json beside this file.

python benchmarks/planner_oracle/run.py                     1,000 problems and 2,000 checks, about half an hour
python benchmarks/planner_oracle/run.py --problems 100 --checks 200
python benchmarks/planner_oracle/run.py --rows /tmp/rows    where each answer is kept: a second run goes on there
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from easier_problems import check_of
from every_plan import fastest_plan
from random_problems import problem_of

from bapipe.errors import InfeasibleError
from bapipe.planner import explore
from bapipe.planner.evaluate import Evaluation
from bapipe.schedule.actions import Kind

HERE = Path(__file__).parent
EQUAL = 1e-3
"""share of the time by which two plans may differ and count as equally fast, and a plan may be slower on more"""


def against_brute_force(seed: int) -> dict[str, Any]:
    """One random problem: how much faster the best of all plans is than the planner's."""
    problem = problem_of(seed)
    begin = time.process_time()
    every = fastest_plan(problem)
    between = time.process_time()
    row: dict[str, Any] = {"seed": seed, "kind": problem.kind, "simulated": every.simulated}
    row["brute_seconds"] = round(between - begin, 3)
    try:
        found = explore(problem.profile, problem.cluster, problem.request)
    except InfeasibleError:
        row["outcome"] = "neither fits" if every.evaluation is None else "refused wrongly"
    else:
        row["candidates"] = found.evaluated
        if every.evaluation is None:
            row["outcome"] = "only the planner's fits"
        else:
            row["slower"] = every.rate / found.best.throughput - 1
            row["outcome"] = (
                "equal" if abs(row["slower"]) <= EQUAL else "slower" if row["slower"] > 0 else "faster"
            )
            if row["outcome"] == "slower":
                row["planner"], row["brute"] = _words(found.best), _words(every.evaluation)
    row["planner_seconds"] = round(time.process_time() - between, 3)
    return row


def _words(found: Evaluation) -> str:
    candidate = found.candidate
    stages = " ".join(
        f"{stage.first}-{stage.last}@{','.join(map(str, stage.accelerators))}" for stage in candidate.stages
    )
    return f"{candidate.schedule.name} K={candidate.schedule.caps} b={candidate.chain.microbatch}: {stages}"


def against_itself(seed: int) -> dict[str, Any]:
    """One pair of problems, of which the second allows all that the first does."""
    check = check_of(seed)
    row: dict[str, Any] = {"seed": seed, "kind": check.kind}
    plans: list[Evaluation | None] = []
    for problem in (check.less, check.more):
        try:
            plans.append(explore(problem.profile, problem.cluster, problem.request).best)
        except InfeasibleError:
            plans.append(None)
    less, more = (0.0 if own is None else own.throughput for own in plans)
    row["slower"] = 0.0 if less == 0 else float("inf") if more == 0 else less / more - 1
    row["outcome"] = "neither fits" if more == less == 0 else "slower" if row["slower"] > EQUAL else "monotone"
    if (
        row["outcome"] == "slower"
        and check.kind == "batch"
        and plans[0] is not None
        and _spares_accumulation(plans[0])
    ):
        every = fastest_plan(check.more)
        if every.evaluation is None or every.rate <= more * (1 + EQUAL):
            row["outcome"] = "accumulation does not fit"
    return row


def _spares_accumulation(found: Evaluation) -> bool:
    """Whether some accelerator has no forward beside weight gradients, as it has in a larger batch."""
    for lane in found.candidate.schedule.lanes:
        kinds = [action.kind for action in lane]
        first = min(kinds.index(kind) for kind in (Kind.B, Kind.W) if kind in kinds)
        if Kind.F not in kinds[first:]:
            return True
    return False


class Answers:
    """A row for every seed: those that a file has, and new ones, which are added to it one by one."""

    def __init__(self, path: Path, seeds: Iterable[int], ask: Callable[[int], dict[str, Any]]) -> None:
        self._path, self._ask, self._known = path, ask, dict[int, dict[str, Any]]()
        if path.exists():
            rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
            self._known = {row["seed"]: row for row in rows}
        self._seeds = list(seeds)
        self._missing = iter([seed for seed in self._seeds if seed not in self._known])

    def add(self, count: int, deadline: float) -> int:
        """Ask for so many more; return how many there were, fewer at the end or after the deadline."""
        done = 0
        for seed in itertools.islice(self._missing, count):
            if time.monotonic() > deadline:
                break
            self._known[seed] = self._ask(seed)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(self._known[seed]) + "\n")
            done += 1
        return done

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [self._known[seed] for seed in self._seeds if seed in self._known]


def brute_summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    counts = Counter(row["outcome"] for row in rows)
    compared = counts["equal"] + counts["slower"] + counts["faster"]
    slower = [row for row in rows if row["outcome"] == "slower"]
    return {
        "problems": len(rows),
        "outcomes": dict(sorted(counts.items())),
        "compared": compared,
        "equal_or_faster_share": (counts["equal"] + counts["faster"]) / max(1, compared),
        "worst": max((row["slower"] for row in slower), default=0.0),
        "by_kind": {
            kind: dict(Counter(row["outcome"] for row in rows if row["kind"] == kind))
            for kind in sorted({row["kind"] for row in rows})
        },
        "slower": slower,
        "planner_seconds_median": float(np.median([row["planner_seconds"] for row in rows])) if rows else None,
        "brute_seconds_median": float(np.median([row["brute_seconds"] for row in rows])) if rows else None,
        "plans_simulated_by_brute_force": sum(row["simulated"] for row in rows),
    }


def monotone_summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    kinds = sorted({row["kind"] for row in rows})
    return {
        "checks": len(rows),
        "outcomes": dict(sorted(Counter(row["outcome"] for row in rows).items())),
        "by_kind": {kind: dict(Counter(row["outcome"] for row in rows if row["kind"] == kind)) for kind in kinds},
        "worst": max((row["slower"] for row in rows if row["outcome"] == "slower"), default=0.0),
        "slower": [row for row in rows if row["outcome"] == "slower"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=1000)
    parser.add_argument("--checks", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first problem and check")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop asking after so long")
    parser.add_argument("--rows", type=Path, help="folder in which every answer is kept")
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    chosen = parser.parse_args()
    deadline = time.monotonic() + 60 * chosen.minutes
    folder = chosen.rows or HERE / "rows"
    folder.mkdir(parents=True, exist_ok=True)
    every = range(chosen.first, chosen.first + chosen.problems)
    pairs = range(chosen.first, chosen.first + chosen.checks)
    problems = Answers(folder / "brute.jsonl", every, against_brute_force)
    checks = Answers(folder / "monotone.jsonl", pairs, against_itself)
    # In turn, so that a run that ends early has some of both.
    while problems.add(10, deadline) + checks.add(20, deadline):
        pass
    result = {
        "environment": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "machine": platform.machine(),
            "system": platform.system(),
        },
        "equal_within": EQUAL,
        "first_seed": chosen.first,
        "brute_force": brute_summary(problems.rows),
        "monotone": monotone_summary(checks.rows),
    }
    chosen.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for part in ("brute_force", "monotone"):
        print(part, json.dumps({key: value for key, value in result[part].items() if key != "slower"}, indent=1))


if __name__ == "__main__":
    main()
