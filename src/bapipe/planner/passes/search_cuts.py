"""Pass: plans that only the simulator finds, tried many at once as far as the effort goes."""

from __future__ import annotations

import contextlib
import itertools
import math

from bapipe.costs.segments import Chain
from bapipe.errors import BaPipeError
from bapipe.planner.candidate import StageChoice
from bapipe.planner.cut_search import CutSearch
from bapipe.planner.dealing_moves import improve_dealing
from bapipe.planner.effort import effort_of
from bapipe.planner.evaluate import Evaluation
from bapipe.planner.incumbents import lightest
from bapipe.planner.interleaved_pipelines import interleaved_candidate
from bapipe.planner.order_space import order_spaces
from bapipe.planner.passes.reorder import reorder_pipelines
from bapipe.planner.plan_climb import climb
from bapipe.planner.state import SearchState
from bapipe.planner.v_pipelines import v_pipelines
from bapipe.schedule.v_shape import V_SHAPED

__all__ = ["climb_starts", "may_search", "search_cuts"]


def search_cuts(state: SearchState) -> None:
    """Add what is faster than all plans so far: other cuts, orders of accelerators, replicas, in-flight counts.

    Where nothing fits, the lightest cuts too. A large problem is left to the exact partition unless more effort is
    asked for.
    """
    request = state.request
    if not may_search(state):
        return
    search = CutSearch(state, effort_of(request.effort, state.tuning))
    if not order_spaces(request):
        _interleave_on_fewer(state, search)
        return
    if not state.thorough(len(state.profile.layers)) and request.effort in ("low", "normal"):
        if search.best is None:
            _fit(state, search)
        return
    before, shapes = search.best, search.shapes(state.tried_sizes)
    if search.open == 0.0 or search.too_many(shapes):
        # Too many plans to try them all: those near the best ones first.
        if any(own.short is not None for own in state.incumbents.by_family.values()):
            _fit(state, search)
        for start in climb_starts(state):
            climb(state, search, start)
    search.sweep(shapes)
    if request.dealing == "speed":
        improve_dealing(state, search)
    _interleave_on_fewer(state, search)
    if search.best is None:
        _fit(state, search)
    state.unsearched = search.open
    if search.best is not before and request.schedule in (None, "zb"):
        reorder_pipelines(state)  # the new best may have an order made for its times, too


def may_search(state: SearchState) -> bool:
    """Whether the request and the accelerators leave plans to the search by simulation."""
    kinds = {state.cluster.type_of(index).execution for index in range(len(state.cluster))}
    return state.request.strategy == "exact" and not state.paper and kinds == {"synchronous"}


def _fit(state: SearchState, search: CutSearch) -> None:
    """Add the lightest cuts at every micro-batch size."""
    for size in state.tried_sizes:
        search.fit(state.chain(size))


def _interleave_on_fewer(state: SearchState, search: CutSearch) -> None:
    """Add interleaving and V shapes on fewer ranks than there are accelerators, where one is faster than all."""
    request, count = state.request, len(state.cluster)
    if request.schedule not in (None, "interleaved", *V_SHAPED) or request.stages is not None:
        return
    for size in state.tried_sizes if count <= state.tuning.fewer_ranks else ():
        chain, microbatches = state.chain(size), state.global_batch // size
        if state.too_large(chain):
            continue
        fewer = range(min(count - 1, microbatches), 1, -1)
        for ranks in fewer if request.schedule != "interleaved" else ():
            best = search.best
            if best is None or state.perfect_time(chain, ranks) < best.time:
                _fold_on(state, search, chain, microbatches, ranks)
        for ranks, virtual in itertools.product(fewer if request.schedule not in V_SHAPED else (), (2, 3)):
            best = search.best
            if best is None or state.perfect_time(chain, ranks) < best.time:
                with contextlib.suppress(BaPipeError):
                    search.offer(
                        interleaved_candidate(chain, state.hardware, microbatches, ranks=ranks, virtual=virtual)
                    )


def _fold_on(state: SearchState, search: CutSearch, chain: Chain, microbatches: int, ranks: int) -> None:
    """Add the V shape that is asked for, or zb-v, on so many ranks."""
    name, tuning = state.request.schedule or "zb-v", state.tuning
    with contextlib.suppress(BaPipeError):
        made = v_pipelines(
            name,
            chain,
            state.hardware,
            microbatches,
            ranks=ranks,
            beat=math.inf if search.best is None else search.best.time,
            lighter=search.best is None,
            tuning=tuning,
        )
        own = lightest(made, within=tuning.as_fast)
        if own is not None:
            search.take(own)


def climb_starts(state: SearchState) -> list[Evaluation]:
    """The best pipelines that fit and are near the best, each of other stages."""
    best, found = state.incumbents.best, dict[tuple[StageChoice, ...], Evaluation]()
    for own in state.incumbents.ranked():
        near = best is not None and own.time <= state.tuning.near_best * best.time
        if own.short is None and near and len(own.candidate.stages) > 1:
            found.setdefault(own.candidate.stages, own)
    return list(found.values())[: state.tuning.search_starts]
