"""Pass: every candidate of every micro-batch size, by passes over one size each."""

from __future__ import annotations

import math
from dataclasses import replace

from bapipe.errors import BaPipeError
from bapipe.planner.candidate import Candidate
from bapipe.planner.data_parallel import at_global_batch, data_parallel_candidate, dealt_data_parallel
from bapipe.planner.hybrids import REPLICATED
from bapipe.planner.incumbents import lightest, rank
from bapipe.planner.interleaved_pipelines import interleaved_candidate, looped_pipelines
from bapipe.planner.intra_layer_cuts import splits_everywhere
from bapipe.planner.passes.family_passes import FAMILY_PASSES, FamilyScope, SharedPartitions, reuse_cuts
from bapipe.planner.pipelines import Family, families_for, permitted
from bapipe.planner.request import ENGINES, Request
from bapipe.planner.state import SearchState, SizeScope
from bapipe.planner.v_pipelines import v_pipelines
from bapipe.schedule.v_shape import V_SHAPED

__all__ = [
    "SIZE_PASSES",
    "try_data_parallelism",
    "try_every_depth",
    "try_looped_pipelines",
    "try_pipelines",
    "try_sizes",
]


def try_sizes(state: SearchState) -> None:
    """Add the best of every family of schedules over all chosen micro-batch sizes, each simulated."""
    for size in state.tried_sizes:
        scope = state.scope(size)
        for run in SIZE_PASSES:
            run(state, scope)


def try_data_parallelism(state: SearchState, scope: SizeScope) -> None:
    """Add data parallelism, with gradient accumulation where the global batch asks for it."""
    request, chain = scope.request, scope.chain
    wanted = request.schedule in (None, "data-parallel") and request.strategy in ("exact", "bapipe", "dp")
    if not wanted or request.stages not in (None, 1):
        return
    if state.paper:
        state.consider("data-parallel", data_parallel_candidate(chain, state.hardware, 1))
        return
    whole = at_global_batch(chain, state.hardware, state.global_batch)
    if whole is not None:
        plain = whole.schedule.num_microbatches == len(state.cluster)
        state.consider("data-parallel" if plain else "data-parallel, accumulated", whole)
    if request.dealing == "speed" and request.strategy == "exact":
        dealt = dealt_data_parallel(chain, state.hardware, state.global_batch)
        if dealt is not None:
            state.consider("data-parallel, dealt by speed", dealt)


def try_pipelines(state: SearchState, scope: SizeScope) -> None:
    """Add pipelines under every family of schedules, of the depth that is asked for or of any.

    A family that already beats what this size allows is left out.
    """
    if not _wants_pipelines(scope.request):
        return
    families = _families(state, scope.request)
    shared = SharedPartitions.of(state, scope)
    for name, family in families.items():
        if state.incumbents.beats(name, scope.bound):
            continue
        own = FamilyScope(size=scope, name=name, family=family, shared=shared)
        if reuse_cuts(state, own):
            continue
        for run in FAMILY_PASSES:
            run(state, own)
    try_looped_pipelines(state, scope)


def try_looped_pipelines(state: SearchState, scope: SizeScope) -> None:
    """Add pipelines with several stages on an accelerator: interleaved ones and V shapes."""
    if not state.straight:
        _try_interleaving(state, scope)
        _try_v_shapes(state, scope)


def try_every_depth(state: SearchState, scope: SizeScope) -> None:
    """Add pipelines of each depth where every layer may be split.

    Split layers make other depths worth while than whole ones, and the exact partition offers one depth.
    """
    request, chain = scope.request, scope.chain
    if not _wants_pipelines(request) or request.stages is not None:
        return
    if not splits_everywhere(chain, state.hardware, request, state.tuning):
        return
    for depth in range(min(len(state.cluster), len(chain)), 0, -1):
        best = state.incumbents.best
        if best is not None and best.time <= state.perfect_time(chain, depth):
            break
        try_pipelines(state, replace(scope, request=replace(request, stages=depth)))


SIZE_PASSES = (try_data_parallelism, try_pipelines, try_every_depth)
"""what is tried at each micro-batch size, in this order"""


def _wants_pipelines(request: Request) -> bool:
    return request.strategy not in ("dp", *ENGINES) and request.schedule != "data-parallel"


def _schedule_of(request: Request) -> str | None:
    return "gpipe" if request.strategy == "gpipe" else request.schedule


def _families(state: SearchState, request: Request) -> dict[str, Family]:
    """The families that are asked for and that the accelerators allow; refuses a schedule of none."""
    wanted = _schedule_of(request)
    known = permitted(families_for(state.cluster, paper=state.paper, wanted=wanted, cap=request.cap), request)
    families = {name: family for name, family in known.items() if wanted in (None, family.schedule)}
    if state.to_copy:
        families = {name: family for name, family in families.items() if family.schedule in REPLICATED}
    several = wanted == "interleaved" or (wanted in V_SHAPED and "gpipe" in known)
    if not families and not several:
        where = " in the space of the paper" if state.paper else ""
        raise BaPipeError(
            f"schedule {wanted} does not suit these accelerators{where}; known here: {', '.join(known)}"
        )
    return families


def _may_loop(state: SearchState, request: Request) -> bool:
    """Whether accelerators may have several stages where the schedule is not asked for."""
    return request.schedule is None and (request.stages is None or state.to_copy)


def _try_interleaving(state: SearchState, scope: SizeScope) -> None:
    """Add interleaved 1F1B of two or three stages per accelerator, and with more stages on some than on others.

    Where neither fits, with recomputation and up to four: the more stages, the less memory one needs.
    """
    request, wanted = scope.request, _schedule_of(scope.request)
    forced = wanted == "interleaved"
    if state.paper or request.strategy != "exact" or not (forced or _may_loop(state, request)):
        return
    ranks = request.stages or len(state.cluster)
    if state.incumbents.beats("interleaved", scope.bound) or ranks < 2:
        return
    if scope.microbatches < ranks and not forced:
        return
    alike = len(scope.chain.types) == 1
    made: list[Candidate] = []
    refused: BaPipeError | None = None
    for virtual in (2, 3, 4) if alike else ():
        try:
            made.append(
                interleaved_candidate(
                    scope.chain, state.hardware, scope.microbatches, ranks=ranks, virtual=virtual
                )
            )
        except BaPipeError as error:
            refused = error if forced and virtual == 2 else None
            break
    for candidate in made[:2]:
        state.consider("interleaved", candidate)
    _try_unequal_numbers(state, scope, ranks, forced=forced)
    if refused is not None and "interleaved" not in state.incumbents.by_family:
        raise refused
    if not alike:
        return
    held = state.incumbents.by_family.get("interleaved")
    if request.whole_stages and (held is None or held.short is not None):
        for candidate in made:
            again = tuple(replace(stage, recompute=True) for stage in candidate.stages)
            label = f"{candidate.label}, recomputing"
            state.consider("interleaved with recomputation", replace(candidate, stages=again, label=label))


def _try_unequal_numbers(state: SearchState, scope: SizeScope, ranks: int, *, forced: bool) -> None:
    """Add interleaving with more stages on some accelerators than on others, where it may be the fastest."""
    if ranks > scope.microbatches or not (forced or state.thorough(len(scope.chain))):
        return
    own, best = state.incumbents.by_family.get("interleaved"), state.incumbents.best
    if best is None and not forced:
        return  # where nothing fits, schedules that hold less are wanted
    held = own if forced else best
    within = math.inf if held is None or held.short is not None else held.time * (1 + state.margin)
    try:
        made = looped_pipelines(
            scope.chain, state.hardware, scope.microbatches, ranks=ranks, within=within, tuning=state.tuning
        )
    except BaPipeError:
        if forced and own is None:
            raise
        return
    for evaluation in made:
        state.incumbents.add("interleaved", evaluation)
    mixed = len(scope.chain.types) > 1
    if forced and mixed and "interleaved" not in state.incumbents.by_family:
        raise BaPipeError(
            f"interleaving needs two stages on some of {ranks} accelerators, {scope.chain.profile.model.name} has "
            f"{len(scope.chain)} layers, and orders for mixed ones are made up to {state.tuning.order_size} "
            "forwards; lower --stages or choose another --schedule"
        )


def _try_v_shapes(state: SearchState, scope: SizeScope) -> None:
    """Add V-shaped pipelines: what is asked for, else zb-v, and where that does not fit those that hold less.

    DualPipeV must be asked for: what it is made for, forwards and backwards at once, is not run here.
    """
    request, wanted = scope.request, _schedule_of(scope.request)
    forced = wanted in V_SHAPED
    if state.paper or request.strategy != "exact" or not (forced or _may_loop(state, request)):
        return
    ranks = request.stages or len(state.cluster)
    if forced and request.stages is None:
        ranks = min(ranks, len(scope.chain) // 2)
    if ranks < 2 or not (forced or (scope.microbatches >= ranks and state.thorough(len(scope.chain)))):
        return
    if not forced and state.too_large(scope.chain):
        return
    for name in (wanted,) if wanted is not None else ("zb-v", "v-half", "v-min"):
        if state.incumbents.beats(name, scope.bound):
            return
        held = state.incumbents.best
        beat = math.inf if held is None or forced else held.time * (1 + state.margin)
        try:
            made = v_pipelines(
                name,
                scope.chain,
                state.hardware,
                scope.microbatches,
                ranks=ranks,
                beat=beat,
                lighter=forced,
                tuning=state.tuning,
            )
        except BaPipeError:
            if forced:
                raise
            return
        best = lightest(made, within=state.tuning.as_fast) or min(made, key=rank)
        state.incumbents.add(name, best)
        if best.short is None:
            return
