"""Table IV measured: the largest GNMT-L that trains for three steps in 16 GB a slice.

    PYTHONPATH=src python3 benchmarks/slices/largest.py --out DIR --profiles profiles/h200/with-loss \
        --counts 1,2,4,8 --systems DP,GPipe,BaPipe,PipeDream --tries 4 --budget-seconds 500

As in the paper: micro-batches of 32, M = 2N of them, Adam, no recomputation, BaPipe by 1F1B-SNO. A search starts
at the L that the planner says and goes up by 3 % while that trains, or down until it does, then between the two;
--tries bounds it. Beyond the planner's L a plan is made for as little more memory as it takes. On one slice all
systems are one, which is DP. Writes DIR/largest.json after every try: rows of `system`, `slices`, `predicted`,
`layers` (the largest that trained) and what was `tried`, each with its outcome: trained, out of memory, or error.
Needs torch and numpy only.

--predict says only what the planner says. --rehearse goes the same way on the CPU, with a small GNMT that is
profiled on the spot, in processes that are kept to as much memory.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import rehearsal
from deep_gnmt import deep_profile
from machine import MEMORY, Machine, slices_of
from size_search import following
from workers import Workers

from bapipe.costs.profile import Profile, read_profile
from bapipe.errors import BaPipeError, InfeasibleError
from bapipe.hardware.cluster import Cluster
from bapipe.planner import Exploration, Request, explore, make_plan
from bapipe.planner.evaluate import evaluate
from bapipe.planner.fixed_partitions import paper_candidate
from bapipe.planner.pipelines import FAMILIES
from bapipe.records.plan import Plan, write_plan
from bapipe.records.run_record import read_run
from bapipe.torch.slices.mps import even_slices

SIZE = 32
SHARE = 25.0
"""%, of the slice whose profile is planned with: what fits does not depend on it"""
TRY_SECONDS, LEAST_SECONDS = 240.0, 30.0
"""after which a try is given up, and of the budget for one to begin"""
LINKS = {"bandwidth": 50e9, "latency": 2e-3, "all_reduce": 2e9, "all_reduce_loaded": 2e9}
"""as measured on slices before; only the choice among fitting partitions depends on them"""
SYSTEMS: dict[str, dict[str, Any]] = {
    "DP": {"schedule": "data-parallel"},
    "GPipe": {"schedule": "1f1b-sno", "space": "paper"},
    "BaPipe": {"schedule": "1f1b-sno", "space": "paper"},
    "PipeDream": {"schedule": "pipedream", "strategy": "pipedream"},
    "BaPipe-free": {},
}
"""what is asked of the planner; BaPipe-free may choose all but the micro-batch: schedule, cuts, recomputation"""
_MORE_MEMORY = (1.0, 1.03, 1.06, 1.1, 1.15, 1.25, 1.5)
"""of a slice's, for which a plan is tried beyond the planner's own L"""
_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|bad_alloc|MemoryError|ALLOC_FAILED|ALLOCATION_FAILED", re.IGNORECASE
)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--profiles", type=Path, help="folder of gnmt-8-fp32.json; a rehearsal makes it")
    made.add_argument("--counts", help="1,2,4,8; in a rehearsal 2")
    made.add_argument("--systems", default="DP,GPipe,BaPipe,PipeDream", help=f"of {','.join(SYSTEMS)}")
    made.add_argument("--tries", type=int, help="of each system on so many slices: 4; in a rehearsal 2")
    made.add_argument("--predict", action="store_true", help="only what the planner says; needs no GPU")
    made.add_argument("--rehearse", action="store_true", help="on the CPU, with a small GNMT")
    made.add_argument("--budget-seconds", type=float, default=500.0)
    return made


def main() -> None:
    made = parser()
    options = made.parse_args()
    systems = [name for name in SYSTEMS if name.lower() in options.systems.lower().split(",")]
    if not systems:
        made.error(f"--systems are {', '.join(SYSTEMS)}")
    if options.profiles is None and not options.rehearse:
        made.error("--profiles is needed, but for a --rehearse")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that nothing is left running
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.budget_seconds
    rows: list[dict[str, Any]] = []
    for count in map(int, (options.counts or ("2" if options.rehearse else "1,2,4,8")).split(",")):
        machine = machine_of(options, count)
        if options.rehearse:
            options.profiles = options.profiles or options.out / "profiles"
            rehearsal.write_profiles(options.profiles, machine, ["gnmt-8"], (SIZE,), args=rehearsal.DEEP)
        profile = read_profile(options.profiles / "gnmt-8-fp32.json")
        own = [name for name in systems if name == "DP" or count > 1]
        here = [{"system": name, "slices": count, **predicted(profile, machine, name)} for name in own]
        rows += here
        write_rows(options.out, rows)
        if options.predict:
            print(json.dumps(here), flush=True)
        elif deadline - time.monotonic() > LEAST_SECONDS and any("predicted" in row for row in here):
            with Workers(options.out / "workers", machine) as workers:
                for row in (row for row in here if "predicted" in row):
                    for _ in measure(options, workers, machine, profile, row, deadline):
                        write_rows(options.out, rows)


def machine_of(options: argparse.Namespace, count: int) -> Machine:
    """One or two slices are quarters, so that all have the same GPU."""
    if options.rehearse:
        return Machine(device="cpu", shares=(25.0,) * count, memory=rehearsal.DEEP_MEMORY, limited=True)
    return Machine(device="cuda", shares=even_slices(max(count, 4))[:count], memory=MEMORY)


def write_rows(folder: Path, rows: list[dict[str, Any]]) -> None:
    part = folder / "largest.json.part"
    part.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    part.replace(folder / "largest.json")


def measure(
    options: argparse.Namespace,
    workers: Workers,
    machine: Machine,
    profile: Profile,
    row: dict[str, Any],
    deadline: float,
) -> Iterator[None]:
    """Fill the row: the largest L that trained, and all that was tried; yields after every try."""
    row |= {"layers": None, "tried": []}
    tries = options.tries or (2 if options.rehearse else 4)
    while len(row["tried"]) < tries:
        layers = following(row["predicted"], {item["layers"]: item["outcome"] for item in row["tried"]})
        left = deadline - time.monotonic()
        if layers is None or left < LEAST_SECONDS:
            break
        start = time.monotonic()
        found = tried(options.out, workers, machine, profile, row["system"], layers, min(left - 15, TRY_SECONDS))
        found = {"layers": layers, **found, "seconds": time.monotonic() - start}
        row["tried"].append(found)
        trained = [item["layers"] for item in row["tried"] if item["outcome"] == "trained"]
        row["layers"] = max(trained, default=None)
        shown = {**row, **{key: value for key, value in found.items() if key != "log"}}
        print(json.dumps({key: value for key, value in shown.items() if key != "tried"}), flush=True)
        yield


def predicted(profile: Profile, machine: Machine, system: str) -> dict[str, Any]:
    """`predicted`, the largest L that the planner has a plan for, or the `error`."""
    low, high = 6, 800
    while high - low > 2:
        middle = (low + high) // 4 * 2
        try:
            planned(profile, machine, system, middle)
            low = middle
        except InfeasibleError as problem:
            high, error = middle, str(problem)
        except BaPipeError as problem:
            return {"error": str(problem)}
    return {"predicted": low} if low >= 8 else {"error": error}


def planned(profile: Profile, machine: Machine, system: str, layers: int, *, more: float = 1.0) -> Plan:
    """The system's plan for slices of `more` times their memory."""
    count, asked = len(machine), dict(SYSTEMS[system])
    if system not in ("DP", "BaPipe-free"):
        asked["stages"] = count
    global_batch = SIZE * (count if system == "DP" else 2 * count)
    cluster = machine.cluster(LINKS, shares=(SHARE,) * count, memory=machine.room * more)
    request = Request(global_batch=global_batch, microbatch=SIZE, optimizer="adam", **asked)
    deep = deep_profile(profile, layers)
    return make_plan(gpipe(deep, cluster, request) if system == "GPipe" else explore(deep, cluster, request))


def gpipe(profile: Profile, cluster: Cluster, request: Request) -> Exploration:
    """GPipe without recomputation, cut by the paper's steps until it fits; the planner's own would recompute."""
    found = explore(profile, cluster, request)
    hardware = found.hardware
    assert request.global_batch is not None
    chain = found.best.candidate.chain
    candidate = paper_candidate(chain, hardware, FAMILIES["gpipe"], request.global_batch // SIZE, request)
    assert candidate is not None
    best = evaluate(candidate, hardware)
    if best.short is not None:
        raise InfeasibleError(f"stage {best.short[0]} is {best.short[1]:.3g} bytes short")
    return replace(found, best=best, steps=candidate.steps)


def tried(
    folder: Path, workers: Workers, machine: Machine, profile: Profile, system: str, layers: int, limit: float
) -> dict[str, Any]:
    """What became of training it: its outcome, and the memory predicted and measured."""
    plan, error = None, ""
    for more in _MORE_MEMORY:
        try:
            plan = planned(profile, machine, system, layers, more=more)
            break
        except BaPipeError as problem:
            error = str(problem)
    if plan is None:
        return {"outcome": "error", "error": f"not planned: {error}"}
    path = folder / f"gnmt-{layers}-{system}-{len(machine)}.plan.json"
    run = path.with_name(path.name.replace(".plan.", ".run."))
    write_plan(plan, path)
    request = {"slices": slices_of(plan), "plan": str(path.resolve()), "run": str(run.resolve()), "steps": 3}
    told = workers.ask(request, limit)
    path.unlink()
    found: dict[str, Any] = {"memory_predicted": [stage.memory_bytes for stage in plan.stages]}
    if "error" in told:
        short = _OUT_OF_MEMORY.search(f"{told['error']} {told.get('log', '')}")
        return found | {"outcome": "out of memory" if short else "error", **told}
    found["memory_measured"] = list(read_run(run).peak_memory)
    run.unlink()
    return found | {"outcome": "trained"}


if __name__ == "__main__":
    main()
