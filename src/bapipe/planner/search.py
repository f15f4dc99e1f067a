"""The joint search: partition × schedule × micro-batch size × depth × replicas, against data parallelism.

All candidates train the same global batch (except in the paper's space, where data parallelism steps the optimizer
once per N micro-batches, and throughput decides). Each is timed by the simulator; the fastest that fits is the
plan. `bapipe.planner.passes` lists how.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bapipe.costs.planned_optimizer import planned_optimizer
from bapipe.costs.profile import Profile
from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import Cluster
from bapipe.planner.candidate import Hardware
from bapipe.planner.data_parallel import Estimate
from bapipe.planner.evaluate import Evaluation
from bapipe.planner.incumbents import rank
from bapipe.planner.outlook import Outlook
from bapipe.planner.partition.paper.step_record import Step
from bapipe.planner.passes import PASSES
from bapipe.planner.request import Request, default_global_batch, microbatch_sizes, profiled_range
from bapipe.planner.scenarios import known_errors
from bapipe.planner.state import SearchState, ideal_seconds
from bapipe.planner.tuning import DEFAULT_TUNING, Tuning

__all__ = ["Exploration", "explore_way", "lower_bound"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exploration:
    """What the search found."""

    request: Request
    profile: Profile
    hardware: Hardware
    global_batch: int
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
    left_out: float | None
    """by what share of its time a plan that the search by simulation left out may be faster, at most; 0 where it
    left out none, None where there was no such search"""
    outlook: Outlook | None = None
    """what the plan and its alternatives take where times are not exact; None: no error is known"""
    tuning: Tuning = DEFAULT_TUNING
    """the constants that the search went by"""
    other_way: Exploration | None = None
    """the search with stages compiled where these run as captured, or the reverse, where the profile has both"""
    way_reason: str | None = None
    """why the other way has no plan to compare with, where the profile has both"""

    @property
    def compiled(self) -> bool:
        """Whether the plan's stages run compiled."""
        asked = self.request.compiled
        return self.profile.compiled if asked == "auto" else asked


def lower_bound(profile: Profile, cluster: Cluster, global_batch: int) -> float:
    """Perfect split of the global batch at each accelerator's best profiled efficiency, no communication."""
    _, _, sizes = profiled_range(profile, cluster)
    fastest: dict[str, float] = {}
    for name in dict.fromkeys(item.type for item in cluster.accelerators):
        costs = ((size, profile.at(name, size)) for size in sizes)
        fastest[name] = max(size / float((own.forward + own.backward).sum()) for size, own in costs)
    return global_batch / sum(fastest[item.type] for item in cluster.accelerators)


def explore_way(
    profile: Profile,
    cluster: Cluster,
    request: Request,
    *,
    explain: bool = False,
    tuning: Tuning = DEFAULT_TUNING,
    progress: Callable[[str, float], None] | None = None,
) -> Exploration:
    """Find the fastest plan that fits, of a profile whose layers were measured one way; `bapipe.planner.explore`
    says more."""
    state = _start(profile, cluster, request, explain=explain, tuning=tuning)
    state.progress = progress
    for run in PASSES:
        run(state)
    return _exploration(state)


def _start(profile: Profile, cluster: Cluster, request: Request, *, explain: bool, tuning: Tuning) -> SearchState:
    """The state before the first pass; refuses what the profile or the cluster cannot do."""
    global_batch = request.global_batch or default_global_batch(profile, cluster, request.microbatch)
    sizes = microbatch_sizes(profile, cluster, request, global_batch)
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
        global_batch=global_batch,
        sizes=tuple(sizes),
        tuning=tuning,
        explain=explain,
        errors=known_errors(profile, cluster, request),
    )


def _exploration(state: SearchState) -> Exploration:
    """What the state holds after the last pass."""
    best = state.best
    global_batch = best.samples if state.paper else state.global_batch
    return Exploration(
        request=state.request,
        profile=state.profile,
        hardware=state.hardware,
        global_batch=global_batch,
        best=best,
        considered=tuple(sorted((*state.incumbents.by_family.values(), *state.engines), key=rank)),
        estimates=state.estimates,
        lower_bound=lower_bound(state.profile, state.cluster, global_batch),
        ideal=ideal_seconds(best.candidate.chain, state.cluster),
        steps=best.candidate.steps,
        paper_steps=state.paper_steps,
        evaluated=state.incumbents.count,
        left_out=_left_out(state),
        outlook=state.outlook,
        tuning=state.tuning,
    )


def _left_out(state: SearchState) -> float | None:
    """How much of the best plan's time the search by simulation could not rule out."""
    if state.unsearched is None or state.choice is not None:
        return None
    least = max(
        state.unsearched * state.global_batch, lower_bound(state.profile, state.cluster, state.global_batch)
    )
    return max(0.0, 1 - least / state.best.time)
