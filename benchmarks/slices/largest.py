"""Table IV measured: the largest GNMT-L that trains for three steps in 16 GB a slice.

    PYTHONPATH=src python3 benchmarks/slices/largest.py --out DIR --profiles profiles/h200/with-loss \
        --counts 1,2,4 --systems dp,gpipe,bapipe,pipedream --budget-seconds 500

As in the paper: micro-batches of 32, M = 2N of them, Adam, no recomputation, BaPipe by 1F1B-SNO. A search starts
at the L that the planner says and goes up while it trains, or down until it does; --tries bounds it. Writes
DIR/largest.json with every try, also when the budget runs out. Needs torch and numpy only.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from deep_gnmt import deep_profile
from slices import MEMORY, Workers, slice_cluster

from bapipe.cluster import Cluster
from bapipe.errors import InfeasibleError
from bapipe.evaluate import evaluate
from bapipe.explore import Exploration, Request, explore, make_plan
from bapipe.explore.pipelines import FAMILIES
from bapipe.explore.strategies import paper_candidate
from bapipe.plan import Plan, write_plan
from bapipe.profile import Profile, read_profile
from bapipe.torch import slices

SIZE = 32
LINKS = {"bandwidth": 50e9, "latency": 2e-3, "all_reduce": 2e9}
"""as measured on slices before; only the choice among fitting partitions depends on them"""
SYSTEMS: dict[str, dict[str, Any]] = {
    "dp": {"schedule": "data-parallel"},
    "gpipe": {"schedule": "1f1b-sno", "space": "paper"},
    "bapipe": {"schedule": "1f1b-sno", "space": "paper"},
    "bapipe-free": {},
    "pipedream": {"schedule": "pipedream", "strategy": "pipedream"},
}
"""what is asked of the planner; bapipe-free may choose its schedule, the exact cuts and recomputation"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--profiles", type=Path, required=True, help="folder of gnmt-8-fp32.json")
    made.add_argument("--counts", default="1,2,4")
    made.add_argument("--systems", default="dp,gpipe,bapipe,pipedream")
    made.add_argument("--tries", type=int, default=3)
    made.add_argument("--predict", action="store_true", help="only what the planner says; needs no GPU")
    made.add_argument("--budget-seconds", type=float, default=500.0)
    made.set_defaults(transport="auto")
    return made


def main() -> None:
    options = parser().parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.budget_seconds
    profile = read_profile(options.profiles / "gnmt-8-fp32.json")
    rows: list[dict[str, Any]] = []
    try:
        for count in (int(text) for text in options.counts.split(",")):
            systems = [name for name in options.systems.split(",") if (name == "dp") == (count == 1)]
            if systems:
                rows += measured(options, profile, count, systems, deadline)
    finally:
        (options.out / "largest.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")


def measured(
    options: argparse.Namespace, profile: Profile, count: int, systems: list[str], deadline: float
) -> list[dict[str, Any]]:
    """The rows of one number of slices. One slice is a quarter, so that all have the same GPU."""
    rows: list[dict[str, Any]] = [
        {"system": name, "slices": count, "predicted": predicted(profile, name, count)} for name in systems
    ]
    if options.predict:
        print(json.dumps(rows), flush=True)
        return rows
    shares = slices.even_slices(max(count, 4))[:count]
    cut = slices.start(shares, memory=MEMORY)
    workers = Workers(options, cut)
    try:
        for row in rows:
            tried: dict[int, str] = {}
            layers = row["predicted"]
            while len(tried) < options.tries and layers not in tried and deadline - time.monotonic() > 60:
                tried[layers] = trained(options, workers, profile, row["system"], count, layers)
                print(json.dumps({**row, "layers": layers, "told": tried[layers][-200:]}), flush=True)
                layers += 2 if tried[layers] == "trained" else -2
            fitting = [layers for layers, told in tried.items() if told == "trained"]
            row |= {"layers": max(fitting, default=None), "tried": tried}
    finally:
        workers.stop()
        slices.stop()
    return rows


def predicted(profile: Profile, system: str, count: int) -> int:
    """The largest L that the planner has a plan for."""
    low, high = 8, 400
    while high - low > 2:
        middle = (low + high) // 4 * 2
        try:
            planned(profile, system, count, middle)
            low = middle
        except InfeasibleError:
            high = middle
    return low


def planned(profile: Profile, system: str, count: int, layers: int) -> Plan:
    asked = dict(SYSTEMS[system])
    if system != "dp":
        asked["stages"] = count
    minibatch = SIZE * (count if system == "dp" else 2 * count)
    cluster = slice_cluster((25.0,) * count, LINKS)
    request = Request(minibatch=minibatch, microbatch=SIZE, optimizer="adam", **asked)
    deep = deep_profile(profile, layers)
    return make_plan(gpipe(deep, cluster, request) if system == "gpipe" else explore(deep, cluster, request))


def gpipe(profile: Profile, cluster: Cluster, request: Request) -> Exploration:
    """GPipe without recomputation, cut by the paper's steps until it fits; the planner's own would recompute."""
    found = explore(profile, cluster, request)
    hardware = found.hardware
    assert request.minibatch is not None
    chain = found.best.candidate.chain
    candidate = paper_candidate(chain, hardware, FAMILIES["gpipe"], request.minibatch // SIZE, request)
    assert candidate is not None
    best = evaluate(candidate, hardware)
    if best.short is not None:
        raise InfeasibleError(f"stage {best.short[0]} is {best.short[1]:.3g} bytes short")
    return replace(found, best=best, steps=candidate.steps)


def trained(
    options: argparse.Namespace, workers: Workers, profile: Profile, system: str, count: int, layers: int
) -> str:
    """ "trained", or what went wrong."""
    try:
        plan = planned(profile, system, count, layers)
    except InfeasibleError:
        # The planner has no plan any more: run the last one's cuts no further than it allows.
        return "not planned"
    path = options.out / f"gnmt-{layers}-{system}-{count}.plan.json"
    write_plan(plan, path)
    told = workers.ask({"plan": str(path), "run": str(path) + ".run", "steps": 3, "transport": "auto"}, 150)
    path.unlink()
    return "trained" if "done" in told else str(told["error"])


if __name__ == "__main__":
    main()
