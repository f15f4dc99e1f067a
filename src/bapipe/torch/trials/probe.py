"""The short runs that correct costs and links before a plan is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bapipe.analysis.calibrate import Calibrated, ShortRun, calibrate
from bapipe.costs.profile import Profile
from bapipe.costs.profile_ways import has_both_ways, join_ways, of_way, way_words
from bapipe.errors import BaPipeError, InfeasibleError
from bapipe.hardware.cluster import Cluster
from bapipe.planner import Request, explore, make_plan
from bapipe.records.plan import Plan
from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.trials.run_trials import Report, run_trials
from bapipe.torch.trials.trial_record import Trial

__all__ = ["probe", "probe_plans"]

_MICROBATCHES = 4
"""per accelerator in a run that only measures"""

_TIMES = 2
"""each of them runs so often, in turns"""


def probe_plans(profile: Profile, cluster: Cluster, request: Request, global_batch: int) -> tuple[Plan, ...]:
    """What to run to measure with: pipelines over all accelerators, each of which waits for its messages,
    at the smallest and the largest micro-batch that a plan may take, and data parallelism; what fits of these. Of
    a profile with layers as captured and compiled, these of each way."""
    if has_both_ways(profile):
        ways = [of_way(profile, compiled=compiled) for compiled in (False, True)]
        return tuple(plan for own in ways for plan in probe_plans(own, cluster, request, global_batch))
    count = len(cluster)
    types = {item.type for item in cluster.accelerators}
    known = {size for name in types for size in profile.table(name).microbatches}
    sizes = sorted(size for size in known if size <= max(1, global_batch // count)) or sorted(known)[:1]
    depth = min(count, len(profile.layers))
    found = []
    wanted = [
        ("1f1b-sno", min(sizes), depth),
        ("1f1b-sno", max(sizes), depth),
        ("data-parallel", max(sizes), None),
    ]
    for schedule, size, stages in dict.fromkeys(wanted):
        samples = size * count if schedule == "data-parallel" else size * _MICROBATCHES * count
        own = Request(
            engines=False,
            global_batch=samples,
            microbatch=size,
            schedule=schedule,
            stages=stages,
            optimizer=request.optimizer,
            layer_error=0.0,  # any plan of that shape serves: there is nothing to weigh
            link_error=0.0,
        )
        if stages == 1 and schedule != "data-parallel":
            continue
        try:
            found.append(make_plan(explore(profile, cluster, own)))
        except InfeasibleError:
            continue
    return tuple(found)


def probe(
    profile: Profile,
    cluster: Cluster,
    plans: Sequence[Plan],
    options: RunOptions,
    *,
    code: Path,
    report: Report | None = None,
) -> tuple[Calibrated, tuple[Trial, ...]]:
    """Run the plans for a few steps and correct profile and cluster by what they took.

    Where plans of both ways ran, as captured and compiled, the layers of each are corrected by its own runs, and
    the links by those as captured. Where no plan of one way could be run, the profile has the other way alone.
    """
    trials = run_trials(plans, options, code=code, times=_TIMES, report=report)
    runs = [
        ShortRun(plan=trial.plan, records=trial.records, seconds=trial.seconds)
        for trial in trials
        if trial.seconds is not None
    ]
    if not runs:
        reason = next((trial.failure for trial in trials if trial.failure), "nothing fits")
        raise BaPipeError(f"no plan could be run to measure with: {reason}")
    failed = [_failed(trial) for trial in trials if trial.failure]
    found = _corrected(profile, cluster, runs)
    return replace(found, changes=(*found.changes, *failed)), trials


def _corrected(profile: Profile, cluster: Cluster, runs: Sequence[ShortRun]) -> Calibrated:
    """By the runs of each way, where the profile has both."""
    if not has_both_ways(profile):
        return calibrate(profile, cluster, runs)
    own = {way: [run for run in runs if run.plan.compiled == way] for way in (False, True)}
    found = {way: calibrate(of_way(profile, compiled=way), cluster, ran) for way, ran in own.items() if ran}
    if len(found) == 1:
        ((compiled, only),) = found.items()
        lost = (
            f"no plan could be run {way_words(compiled=not compiled)}: stages run {way_words(compiled=compiled)}"
        )
        return replace(only, changes=(*only.changes, lost))
    changes = [f"{way_words(compiled=way)}: {line}" for way, one in found.items() for line in one.changes]
    profile = join_ways(found[False].profile, found[True].profile)
    return replace(found[False], profile=profile, changes=tuple(changes))


def _failed(trial: Trial) -> str:
    name, size = trial.plan.schedule.name, trial.plan.microbatch_size
    name += ", compiled," if trial.plan.compiled else ""
    return f"a run of {name} at micro-batch {size} failed and says nothing: {trial.failure}"
