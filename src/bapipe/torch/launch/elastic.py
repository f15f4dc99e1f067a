"""A run that goes on when an accelerator is lost: plan again on what is left, resume. Imports no torch."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from bapipe.costs.profile import Profile, read_profile
from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import Cluster
from bapipe.planner import Request, explore, make_plan
from bapipe.records.plan import Plan, write_plan
from bapipe.torch.checkpoint.checkpoint_folder import latest
from bapipe.torch.launch.launcher import attempt, check_here, check_run, print_line, worker_arguments
from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.runtime.plan_checks import check_plan
from bapipe.units import format_seconds

__all__ = ["describe_change", "launch_elastic", "plan_without", "without_accelerator"]


def launch_elastic(plan_path: str | Path, options: RunOptions, *, profile: str | Path) -> int:
    """As `launch`, but where a rank is killed or does not answer, its accelerator is given up and the run goes on.

    The rest of the cluster is planned anew from the profile, for the same global batch; what changed is printed,
    the new plan is left beside the checkpoints, and training resumes from the last complete one, or from the
    start if there is none. A rank that fails of itself, by an exception in the model or an input that is
    refused, ends the run as always. The options must have `saving`. Returns the exit code.
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
        failure = attempt(runnable, [*worker_arguments(path, options), *code_folder])
        if failure is None:
            return 0
        print_line(failure)
        if not failure.lost:
            return failure.code
        plan = runnable.plan
        lost = plan.ranks[failure.rank]
        try:
            after = plan_without(plan, costs, lost)
            runnable = check_plan(after)
        except BaPipeError as error:
            print(f"bapipe: without {lost} the run cannot go on: {error}", file=sys.stderr)
            return failure.code
        saving.folder.mkdir(parents=True, exist_ok=True)
        path = saving.folder / f"plan-{len(after.cluster)}.json"
        write_plan(after, path)
        found = latest(saving.folder)
        start = f"training goes on from {found}" if found else "no checkpoint is complete; training starts again"
        print(f"{describe_change(plan, after, lost)}\n{start} by {path}", flush=True)
        options = replace(options, saving=saving.resumed())


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
    stay = {accelerator.name for accelerator in left}
    pairs = {key: link for key, link in cluster.pairs.items() if stay.issuperset(key.split(" - "))}
    return replace(cluster, accelerators=left, pairs=pairs)


def plan_without(plan: Plan, profile: Profile, lost: str) -> Plan:
    """The best plan that the runtime runs on the cluster without the lost accelerator, for the same global batch.

    Micro-batches keep their size where a plan with them fits, because dropout and batch-norm depend on it: so the
    training stays the same. The optimizer, the model and its arguments are the plan's.
    """
    cluster = without_accelerator(plan.cluster, lost)
    request = Request(minibatch=plan.minibatch, optimizer=plan.optimizer)
    try:
        found = explore(profile, cluster, replace(request, microbatch=plan.microbatch_size))
    except BaPipeError:
        found = explore(profile, cluster, request)
    return replace(make_plan(found), model=plan.model, optimizer=plan.optimizer)


def describe_change(before: Plan, after: Plan, lost: str) -> str:
    """What changes with the plan, in a line each: stages, schedule, micro-batches, predicted time."""
    slower = after.prediction.time / before.prediction.time
    lines = [
        f"{lost} is lost; planned again on {len(after.ranks)} of {len(after.cluster)} accelerators:",
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
