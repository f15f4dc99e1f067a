"""A run that goes on when an accelerator is lost or has become slow: plan again for what is there, resume. Imports
no torch."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bapipe.analysis.recalibrate import predict_again
from bapipe.costs.fields import COST_FIELDS, CostTable, as_tuples
from bapipe.costs.profile import Profile, read_profile
from bapipe.costs.profile_ways import of_way
from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import Cluster
from bapipe.hardware.slowed_types import slowed_type
from bapipe.planner import Request, explore, make_plan
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.records.plan import Plan, write_plan
from bapipe.torch.checkpoint.checkpoint_folder import latest
from bapipe.torch.health.failure import Failure
from bapipe.torch.launch.launcher import attempt, check_here, check_run, print_line, worker_arguments
from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.runtime.plan_checks import check_plan
from bapipe.units import format_seconds

__all__ = ["describe_change", "launch_elastic", "plan_slowed", "plan_without", "without_accelerator"]

_WORTH = 0.95
"""of the predicted time of going on, that a plan for other speeds may have at most"""


def launch_elastic(plan_path: str | Path, options: RunOptions, *, profile: str | Path, speed: bool = False) -> int:
    """As `launch`, but where a rank is killed or does not answer, its accelerator is given up and the run goes on.

    The rest of the cluster is planned anew from the profile, for the same global batch; what changed is printed,
    the new plan is left beside the checkpoints, and training resumes from the last complete one, or from the
    start if there is none. A rank that fails of itself, by an exception in the model or an input that is
    refused, ends the run as always. The options must have `saving`. Returns the exit code.

    With `speed` it is also planned again when a rank has become slow, with its accelerator as slow as it was
    found; where no plan is predicted to be faster by at least 5 %, the old one goes on, and ranks that are slow
    are only named.
    """
    runnable = check_run(plan_path, options)
    saving = options.saving
    if saving is None:
        raise BaPipeError("a run that plans again goes on from checkpoints, and none are saved; give --checkpoint")
    costs, path = read_profile(profile), Path(plan_path)
    _check_profile(runnable.plan, costs)
    check_here(runnable, options)
    code_folder = ["--code", str(path.resolve().parent)]
    while True:
        leaving = ["--leave-slow"] if speed else []
        arguments = [*worker_arguments(path, options), *code_folder, *leaving]
        failure = attempt(runnable, arguments, timeout=options.timeout)
        if failure is None:
            return 0
        print_line(failure)
        if not failure.lost and not failure.slowed:
            return failure.code
        plan = runnable.plan
        name = plan.ranks[failure.rank]
        try:
            if failure.lost:
                after: Plan | None = plan_without(plan, costs, name)
                news = f"{name} is lost"
            else:
                costs, after = plan_slowed(plan, costs, name, failure.slowed)
                news = f"{name} takes {failure.slowed:.1f}x as long as before"
            runnable = runnable if after is None else check_plan(after)
        except BaPipeError as error:
            print(f"bapipe: {_without(name, failure)} the run cannot go on: {error}", file=sys.stderr)
            return failure.code
        saving.folder.mkdir(parents=True, exist_ok=True)
        found = latest(saving.folder)
        start = f"training goes on from {found}" if found else "no checkpoint is complete; training starts again"
        options = replace(options, saving=saving.resumed())
        if after is None:
            speed = False
            print(f"{news}, and no plan is predicted to be faster by 5 %\n{start} by {path}", flush=True)
            continue
        path = _new_file(saving.folder, len(after.cluster), slowed=not failure.lost)
        write_plan(after, path)
        print(f"{describe_change(plan, after, news)}\n{start} by {path}", flush=True)


def _without(name: str, failure: Failure) -> str:
    return f"without {name}" if failure.lost else f"with {name} {failure.slowed:.1f}x slower"


def _new_file(folder: Path, accelerators: int, *, slowed: bool) -> Path:
    """Where a new plan is written: of what is left, `plan-2.json`; for other speeds `plan-speed-1.json`, -2 …"""
    if not slowed:
        return folder / f"plan-{accelerators}.json"
    number = next(n for n in itertools.count(1) if not (folder / f"plan-speed-{n}.json").exists())
    return folder / f"plan-speed-{number}.json"


def _check_profile(plan: Plan, profile: Profile) -> None:
    """A plan for the rest must be of the same layers."""
    planned = list(dict.fromkeys(name for stage in plan.stages for name in stage.layers))
    profiled = [layer.name for layer in profile.layers]
    if planned != list(dict.fromkeys(profiled)) or plan.dtype != profile.dtype:
        raise BaPipeError(
            f"the profile has {len(profiled)} layers of {profile.model.name} in {profile.dtype}, the plan "
            f"{len(planned)} of {plan.model.name} in {plan.dtype}; give the profile that the plan was made from"
        )


def without_accelerator(cluster: Cluster, name: str) -> Cluster:
    """The cluster without one accelerator; of a chain that breaks there, the longer part."""
    names = [accelerator.name for accelerator in cluster.accelerators]
    gone = names.index(name)
    before, after = cluster.accelerators[:gone], cluster.accelerators[gone + 1 :]
    left = max(before, after, key=len) if cluster.topology == "chain" else (*before, *after)
    if not left:
        raise BaPipeError("no accelerator is left; add some and resume by hand")
    return cluster.part(left)


def plan_without(plan: Plan, profile: Profile, lost: str) -> Plan:
    """The best plan that the runtime runs on the cluster without the lost accelerator, for the same global batch.

    Micro-batches keep their size where a plan with them fits, because dropout and batch-norm depend on it: so the
    training stays the same. The optimizer, the model and its arguments are the plan's, and stages run compiled if
    they did.
    """
    own = of_way(profile, compiled=plan.compiled)
    return _planned(plan, own, without_accelerator(plan.cluster, lost))


def _planned(plan: Plan, profile: Profile, cluster: Cluster) -> Plan:
    request = Request(
        global_batch=plan.global_batch, optimizer=plan.optimizer, engines=False, compiled=plan.compiled
    )
    try:
        found = explore(profile, cluster, replace(request, microbatch=plan.microbatch_size))
    except BaPipeError:
        found = explore(profile, cluster, request)
    return replace(make_plan(found), model=plan.model, optimizer=plan.optimizer)


def plan_slowed(plan: Plan, profile: Profile, name: str, factor: float) -> tuple[Profile, Plan | None]:
    """The best plan where one accelerator takes `factor` times as long as its type, and the profile for that.

    The accelerator gets a type of its own, whose seconds are those of its old one times the factor; micro-batches
    and the rest are as in `plan_without`. None where no plan is predicted to be faster by 5 % than going on.
    """
    profile = of_way(profile, compiled=plan.compiled)
    usual = next(item.type for item in plan.cluster.accelerators if item.name == name)
    slow = slowed_type(usual, factor)
    costs = replace(profile, accelerators={**profile.accelerators, slow: _slowed(profile.table(usual), factor)})
    cluster = replace(
        plan.cluster,
        types={**plan.cluster.types, slow: replace(plan.cluster.types[usual], name=slow)},
        accelerators=tuple(
            replace(item, type=slow) if item.name == name else item for item in plan.cluster.accelerators
        ),
    )
    cluster = replace(cluster, types={item.type: cluster.types[item.type] for item in cluster.accelerators})
    after = _planned(plan, costs, cluster)
    going_on = predict_again(replace(plan, cluster=cluster), costs, cluster)
    return costs, after if after.prediction.time < _WORTH * plan_timeline(going_on).time else None


def _slowed(table: CostTable, factor: float) -> CostTable:
    seconds: dict[str, Any] = {
        name: as_tuples(np.array(value) * factor)
        for name, rule in COST_FIELDS.items()
        if rule.unit == "seconds" and (value := getattr(table, name)) is not None
    }
    return replace(table, description=f"{table.description} | {factor:.2f}x slower in a run", **seconds)


def describe_change(before: Plan, after: Plan, news: str) -> str:
    """What changes with the plan, in a line each: why, stages, schedule, micro-batches, predicted time."""
    slower = after.prediction.time / before.prediction.time
    lines = [
        f"{news}; planned again on {len(after.ranks)} of {len(after.cluster)} accelerators:",
        f"  before  {_described(before)}",
        f"  now     {_described(after)}, {slower:.2f}x the time",
    ]
    if before.microbatch_size != after.microbatch_size:
        lines.append("  micro-batches have another size: dropout and batch-norm will see other ones")
    return "\n".join(lines)


def _described(plan: Plan) -> str:
    stages = " | ".join(f"{stage.first_layer}–{stage.last_layer}" for stage in plan.stages)
    return (
        f"{plan.schedule.name}, layers {stages}, {plan.microbatches} micro-batches of {plan.microbatch_size}, "
        f"{format_seconds(plan.prediction.time)} predicted"
    )
