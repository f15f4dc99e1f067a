"""Pass: which micro-batch sizes are searched, and in which order."""

from __future__ import annotations

import math

from bapipe.planner.cluster_parts import copies_wanted, mixed
from bapipe.planner.data_parallel import at_global_batch
from bapipe.planner.evaluate import evaluate
from bapipe.planner.exact_stages import exact_stages
from bapipe.planner.pipelines import build, families_for
from bapipe.planner.state import SearchState

__all__ = ["choose_sizes"]


def choose_sizes(state: SearchState) -> None:
    """Add the micro-batch sizes to search, those that a perfect split makes fastest first.

    The exact strategy keeps a single one of a large problem: the one at which a pipeline without replicas or data
    parallelism is fastest. Where copies of a part's plan are tried instead (`copy_parts`), it keeps none at which
    a pipeline over all accelerators has very many actions, and of several types of accelerators, which take long
    to put in order, none if there are more of them than layers.
    """
    ordered = sorted(state.sizes, key=lambda size: state.perfect_time(state.chain(size)))
    if not state.thorough(len(state.profile.layers)) and state.request.strategy == "exact":
        if copies_wanted(state):
            ordered = [size for size in ordered if _actions(state, size) <= state.tuning.whole_actions]
            if mixed(state.cluster) and len(state.cluster) > len(state.profile.layers):
                ordered = []
        times = {size: _quick_time(state, size) for size in ordered}
        ordered = [min(times, key=lambda size: (times[size], size))] if times else []
    state.tried_sizes = tuple(ordered)


def _actions(state: SearchState, size: int) -> int:
    """Forwards of a pipeline over all accelerators."""
    return len(state.cluster) * (state.global_batch // size)


def _quick_time(state: SearchState, size: int) -> float:
    """Seconds of the better of one pipeline and data parallelism at this size; infinite where neither fits."""
    families = families_for(state.cluster, paper=False, cap=state.request.cap)
    capped = families.get("1f1b") if state.request.cap is not None else None
    family = (capped or list(families.values())[1]).unreplicated()
    scope = state.scope(size)
    candidates = [at_global_batch(scope.chain, state.hardware, state.global_batch)]
    for chain, stages in exact_stages(state, scope, family):
        candidates.append(build(chain, stages, family, scope.microbatches, state.hardware, state.tuning))
    evaluations = [evaluate(candidate, state.hardware) for candidate in candidates if candidate is not None]
    return min((item.time for item in evaluations if item.short is None), default=math.inf)
