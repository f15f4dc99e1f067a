"""The joint search: partition × schedule × micro-batch size × depth × replicas, against data parallelism.

All candidates train the same global batch (except in the paper's space, where data parallelism steps the optimizer
once per N micro-batches, and throughput decides). Each is timed by the simulator; the fastest that fits is the
plan. `bapipe.planner.passes` lists how.
"""

from __future__ import annotations

from dataclasses import dataclass

from bapipe.costs.planned_optimizer import planned_optimizer
from bapipe.costs.profile import Profile
from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import Cluster
from bapipe.planner.data_parallel import Estimate
from bapipe.planner.evaluate import Evaluation, Hardware
from bapipe.planner.outlook import Outlook
from bapipe.planner.partition.paper.step_record import Step
from bapipe.planner.passes import PASSES
from bapipe.planner.request import Request, default_minibatch, microbatch_sizes, profiled_range
from bapipe.planner.scenarios import known_errors
from bapipe.planner.state import SearchState, ideal_seconds
from bapipe.planner.tuning import DEFAULT_TUNING, Tuning

__all__ = ["Exploration", "explore", "lower_bound"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exploration:
    """What the search found."""

    request: Request
    profile: Profile
    hardware: Hardware
    minibatch: int
    best: Evaluation
    """the plan, with its timeline and memory"""
    considered: tuple[Evaluation, ...]
    """the best of every family, the chosen one included, fastest first; some may not fit"""
    estimates: tuple[Estimate, ...]
    lower_bound: float
    """seconds per global batch"""
    ideal: float
    """T of equation (1), seconds per micro-batch of the chosen size"""
    steps: tuple[Step, ...]
    """how the plan's partition came about, where the paper's rules made it"""
    paper_steps: tuple[Step, ...] = ()
    """how the best partition by the paper's rules came about, where the search was to explain it"""
    evaluated: int
    """candidates that were simulated"""
    brute_gap: float | None
    """how much slower the plan is than the best cut of the same depth, schedule and order of accelerators, each
    one simulated; None where that was not tried"""
    outlook: Outlook | None = None
    """what the plan and its alternatives take where times are not exact; None: no error is known"""
    tuning: Tuning = DEFAULT_TUNING
    """the constants that the search went by"""


def lower_bound(profile: Profile, cluster: Cluster, minibatch: int) -> float:
    """Perfect split of the global batch at each accelerator's best profiled efficiency, no communication."""
    _, _, sizes = profiled_range(profile, cluster)
    rate = 0.0
    for accelerator in cluster.accelerators:
        best = 0.0
        for size in sizes:
            costs = profile.at(accelerator.type, size)
            best = max(best, size / float((costs.forward + costs.backward).sum()))
        rate += best
    return minibatch / rate


def explore(
    profile: Profile,
    cluster: Cluster,
    request: Request | None = None,
    *,
    explain: bool = False,
    tuning: Tuning = DEFAULT_TUNING,
) -> Exploration:
    """Find the fastest plan that fits; raises InfeasibleError saying what would help if none does.

    `explain` also records the steps of the paper's exploration.
    """
    state = _start(profile, cluster, request or Request(), explain=explain, tuning=tuning)
    for run in PASSES:
        run(state)
    return _exploration(state)


def _start(profile: Profile, cluster: Cluster, request: Request, *, explain: bool, tuning: Tuning) -> SearchState:
    """The state before the first pass; refuses what the profile or the cluster cannot do."""
    minibatch = request.minibatch or default_minibatch(profile, cluster, request.microbatch)
    sizes = microbatch_sizes(profile, cluster, request, minibatch)
    if request.stages is not None and request.stages > len(cluster):
        raise BaPipeError(
            f"{request.stages} stages need as many accelerators, the cluster has {len(cluster)}; lower --stages"
        )
    overlap = request.space != "paper"
    types = dict.fromkeys(item.type for item in cluster.accelerators)
    optimizer = planned_optimizer(profile, types, request.optimizer)
    return SearchState(
        profile=profile,
        hardware=Hardware(cluster=cluster, optimizer=optimizer, overlap_all_reduce=overlap),
        request=request,
        minibatch=minibatch,
        sizes=tuple(sizes),
        tuning=tuning,
        explain=explain,
        errors=known_errors(profile, cluster, request),
    )


def _exploration(state: SearchState) -> Exploration:
    """What the state holds after the last pass."""
    best, fastest = state.best, state.fastest_cut
    minibatch = best.samples if state.paper else state.minibatch
    return Exploration(
        request=state.request,
        profile=state.profile,
        hardware=state.hardware,
        minibatch=minibatch,
        best=best,
        considered=tuple(state.incumbents.ranked()),
        estimates=state.estimates,
        lower_bound=lower_bound(state.profile, state.cluster, minibatch),
        ideal=ideal_seconds(best.candidate.chain, state.cluster),
        steps=best.candidate.steps,
        paper_steps=state.paper_steps,
        evaluated=state.incumbents.count,
        brute_gap=None if fastest is None else best.time / fastest.time - 1,
        outlook=state.outlook,
        tuning=state.tuning,
    )
