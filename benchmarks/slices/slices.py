"""Plans trained on one GPU cut into slices by CUDA MPS: predicted beside measured, each in the same run.

    PYTHONPATH=src python3 benchmarks/slices/slices.py --out DIR --profiles profiles/h200/with-loss --count 4 \
        --models vgg16,resnet50,gnmt-8 --cases sno,so,gpipe,dp --steps 5 --budget-seconds 500

Slices are equal (--count) or not (--percentages 50,25,12.5,12.5). A case is for all models, or for one, such as
gnmt-8:zb-h2-split. One process per slice lives through all cases; if one fails, all are started anew for the next.
First the links are measured, with all neighbours sending at once and then the all-reduce, and the plans are made
for them; then every plan trains a few mini-batches. Writes DIR/result.json and DIR/result.md after every case, and
at the end DIR/records.tar.gz with every plan and run. Needs torch and numpy only.

--rehearse goes the same way on the CPU, with small models that are profiled on the spot: to find what would fail
before a GPU is rented.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tarfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import rehearsal
from cases import CASES, SIZES, TORCH, plan_case, torch_time
from machine import Machine, slices_of
from tables import result_table
from workers import Workers

from bapipe.analysis.predicted_measured import StageComparison, compare
from bapipe.costs.profile import Profile, read_profile
from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import Cluster, Link
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.records.plan import Plan, PlanStage, write_plan
from bapipe.records.run_record import RunRecord, read_run
from bapipe.torch.slices.mps import even_slices

CASE_SECONDS, TORCH_SECONDS = 100.0, 40.0
"""after which a case is given up; one of torch's schedules, which may hang, sooner"""
_LEAST_SECONDS, _LAST_SECONDS = 30.0, 15.0
"""of the budget for a case to begin, and to be left when it is given up"""
_SHOWN = ("model", "case", "schedule", "predicted", "measured", "throughput", "error", "memory_measured")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--profiles", type=Path, help="folder of MODEL-fp32.json; a rehearsal makes what it lacks")
    made.add_argument("--count", type=int, help="4; in a rehearsal 2")
    made.add_argument("--percentages", help="of slices that are not equal, such as 50,25,12.5,12.5")
    made.add_argument("--models", help="vgg16,resnet50,gnmt-8; in a rehearsal gnmt-8")
    made.add_argument("--cases", help=f"of {','.join(CASES)}, or all; MODEL:CASE is for one model")
    made.add_argument("--steps", type=int, help="5; in a rehearsal 3")
    made.add_argument("--transport", default="auto")
    made.add_argument("--emulate", type=float, help="bytes/s of links slower than those there are")
    made.add_argument("--rehearse", action="store_true", help="on the CPU, with small models")
    made.add_argument("--budget-seconds", type=float, default=500.0)
    return made


DEFAULTS = {"count": 4, "models": "vgg16,resnet50,gnmt-8", "cases": "sno,so,gpipe,dp", "steps": 5}
REHEARSED = {"count": 2, "models": "gnmt-8", "cases": "all", "steps": 3}


def main() -> None:
    made = parser()
    options = made.parse_args()
    if options.profiles is None and not options.rehearse:
        made.error("--profiles is needed, but for a --rehearse")
    for name, value in (REHEARSED if options.rehearse else DEFAULTS).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that nothing is left running
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.budget_seconds
    shares = even_slices(options.count)
    if options.percentages:
        shares = tuple(float(text) for text in options.percentages.split(","))
    machine = Machine(device="cpu" if options.rehearse else "cuda", shares=shares)
    models = options.models.split(",")
    if not set(models) <= set(SIZES):
        made.error(f"--models are {', '.join(SIZES)}")
    asked = list(CASES) if options.cases == "all" else options.cases.split(",")
    pairs = [(model, case.rpartition(":")[2]) for model in models for case in asked if is_for(case, model)]
    if options.rehearse:
        options.profiles = options.profiles or options.out / "profiles"
        own = {rehearsal.SIZES[model][0] for model in models}
        larger = {CASES[case]["microbatch"] for _, case in pairs if "microbatch" in CASES.get(case, {})}
        rehearsal.write_profiles(options.profiles, machine, models, tuple(sorted(own | larger)))
    result: dict[str, Any] = {
        "slices": len(shares),
        "percentages": shares,
        "memory": machine.memory,
        "links": {},
        "rows": [],
        "left_out": [f"{model} {case}" for model, case in pairs],
    }
    result |= {"emulated": True} if options.emulate else {}
    result |= {"rehearsal": True} if options.rehearse else {}
    try:
        with Workers(options.out / "workers", machine) as workers:
            run_all(options, machine, workers, pairs, result, deadline)
    finally:
        write_result(options.out, result)
        pack(options.out)


def is_for(case: str, model: str) -> bool:
    """Whether a case, MODEL:CASE or CASE, is for this model."""
    only, _, _ = case.rpartition(":")
    return only in ("", model)


def run_all(
    options: argparse.Namespace,
    machine: Machine,
    workers: Workers,
    pairs: list[tuple[str, str]],
    result: dict[str, Any],
    deadline: float,
) -> None:
    """Every case of every model, in turn; what each gave is in the result, and on disk, before the next."""
    # A rehearsal may run on a machine that is busy with something else.
    limit = deadline - time.monotonic() if options.rehearse else min(120.0, deadline - time.monotonic())
    links = workers.ask({"links": 3 if options.rehearse else 30}, limit)
    if "error" in links:
        sys.exit(f"the links cannot be measured, so nothing can be planned: {links['error']}")
    if options.emulate:
        links |= dict.fromkeys(("bandwidth", "all_reduce", "all_reduce_loaded"), options.emulate)
    result["links"] = links
    print("links", json.dumps(links), flush=True)
    for model, case in pairs:
        left = deadline - time.monotonic()
        if left < _LEAST_SECONDS:
            print("budget spent; left out:", ", ".join(result["left_out"]), flush=True)
            return
        cluster = machine.cluster(
            links, shares=even_slices(len(machine)) if case == "as-if-equal" else machine.shares
        )
        limit = min(left - _LAST_SECONDS, TORCH_SECONDS if case in TORCH else CASE_SECONDS)
        try:
            found = run_case(options, workers, model, cluster, case, limit)
        except Exception as error:  # the other cases are worth their money
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        row = {"model": model, "case": case, **found}
        result["rows"].append(row)
        result["left_out"].remove(f"{model} {case}")
        write_result(options.out, result)
        print(json.dumps({key: row[key] for key in _SHOWN if key in row}), flush=True)


def run_case(
    options: argparse.Namespace, workers: Workers, model: str, cluster: Cluster, case: str, limit: float
) -> dict[str, Any]:
    """The row of a case, with its error where it cannot be planned or fails."""
    try:
        profile: Profile = read_profile(options.profiles / f"{model}-fp32.json")
        plan = plan_case(profile, cluster, case, rehearsal.SIZES if options.rehearse else SIZES)
    except BaPipeError as error:
        return {"error": str(error)}
    path = options.out / f"{model}-{case}.plan.json"
    write_plan(plan, path)
    run = path.with_name(f"{model}-{case}.run.json")
    request: dict[str, Any] = {
        "slices": slices_of(plan),
        "plan": str(path.resolve()),
        "run": str(run.resolve()),
        "steps": options.steps,
        "transport": options.transport,
        "emulate": options.emulate,
    }
    if case in TORCH:
        if options.emulate:
            return {"error": "torch's schedules have links of their own, which are not slowed down"}
        request["torch"] = TORCH[case][0]
    about = {
        "ranks": slices_of(plan),
        "schedule": plan.schedule.name,
        "microbatch": plan.microbatch_size,
        "global_batch": plan.global_batch,
        "split": sum(len(stage.fractions) for stage in plan.stages) // 2,
        "recompute": any(stage.recompute for stage in plan.stages),
        "predicted": torch_time(plan, case) if case in TORCH else plan.prediction.time,
    }
    told = workers.ask(request, limit)
    if "error" in told:
        return {**about, **told}
    if case in TORCH:
        return about | torch_row(plan, told)
    return about | measured_row(plan, read_run(run)) | {"reserved": told["reserved"]}


def median_step(seconds: list[float]) -> float:
    """Without the first step, which warms up."""
    ordered = sorted(seconds[1:] or seconds)
    return ordered[len(ordered) // 2]


def torch_row(plan: Plan, told: dict[str, Any]) -> dict[str, Any]:
    measured = median_step(told["seconds"])
    return {
        "schedule": told["schedule"],
        "recompute": False,
        "measured": measured,
        "throughput": plan.global_batch / measured,
        "losses": told["losses"],
        "memory_measured": told["memory"],
        "transport": "gloo",
    }


def measured_row(plan: Plan, record: RunRecord) -> dict[str, Any]:
    """What was measured, beside what was predicted."""
    found = compare(plan, record)
    measured = median_step([step.seconds for step in record.steps])
    return {
        "measured": measured,
        "timeline": found.time.measured,
        "throughput": plan.global_batch / measured,
        "predicted_throughput": plan.prediction.throughput,
        "bubble": [found.bubble.predicted, found.bubble.measured],
        "losses": [step.loss for step in record.steps],
        "free_transfers": free_transfers(plan),
        "memory_predicted": [stage.memory_bytes for stage in plan.stages for _ in stage.accelerators],
        "memory_measured": list(record.peak_memory),
        "peak_in_flight": list(record.peak_in_flight),
        "transport": record.environment.transport,
        "stages": [stage_row(plan.stages[row.stage], row) for row in found.stages],
    }


def stage_row(stage: PlanStage, row: StageComparison) -> dict[str, Any]:
    """What one rank of a stage takes for a micro-batch, predicted and measured."""
    return {
        "layers": [stage.first_layer, stage.last_layer],
        "fractions": [[part.layer, part.start, part.stop, part.of] for part in stage.fractions],
        "rank": row.rank,
        "forward": [row.forward.predicted, row.forward.measured],
        "backward": [row.backward.predicted, row.backward.measured],
    }


def free_transfers(plan: Plan) -> float:
    """Seconds of a mini-batch, predicted, if messages between stages took no time."""
    free = replace(plan.cluster, within=Link(bandwidth=1e18, latency=0.0), between=None, pairs={})
    return plan_timeline(replace(plan, cluster=free)).time


def write_result(folder: Path, result: dict[str, Any]) -> None:
    for name, text in (("result.json", json.dumps(result, indent=1)), ("result.md", result_table(result))):
        part = folder / f"{name}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(folder / name)


def pack(folder: Path) -> None:
    """Plans and runs in one archive."""
    records = sorted((*folder.glob("*.plan.json"), *folder.glob("*.run.json")))
    with tarfile.open(folder / "records.tar.gz", "w:gz") as archive:
        for path in records:
            archive.add(path, arcname=path.name)
    for path in records:
        path.unlink()


if __name__ == "__main__":
    main()
