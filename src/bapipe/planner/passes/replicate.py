"""Pass: PP × DP of whole pipelines, each planned for its share of the accelerators."""

from __future__ import annotations

from dataclasses import replace

from bapipe.errors import BaPipeError
from bapipe.planner.evaluate import Evaluation, evaluate
from bapipe.planner.hybrids import LOOPED, REPLICATED, copies_of, numbers_of_copies
from bapipe.planner.passes.choose_sizes import choose_sizes
from bapipe.planner.passes.reorder import reorder_pipelines
from bapipe.planner.passes.try_sizes import try_sizes
from bapipe.planner.request import microbatch_sizes
from bapipe.planner.state import SearchState

__all__ = ["replicate_pipelines"]


def replicate_pipelines(state: SearchState) -> None:
    """Add replicas of the best pipelines of a half, a third, … of the accelerators and of the global batch."""
    request = state.request
    free = request.stages is None and request.strategy == "exact" and not state.paper
    if (
        not free
        or request.schedule not in (None, *REPLICATED, *LOOPED)
        or not state.thorough(len(state.profile.layers))
    ):
        return
    for number in numbers_of_copies(state.cluster):
        if state.global_batch % number:
            continue
        for evaluation in _pipelines_of_share(state, number):
            for candidate in copies_of(evaluation.candidate, number, state.cluster):
                family = f"{candidate.schedule.name}, hybrid"
                state.incumbents.add(family, evaluate(candidate, state.hardware))


def _pipelines_of_share(state: SearchState, number: int) -> list[Evaluation]:
    """The best pipeline of each schedule on the first of so many equal parts of the cluster.

    [] where that cannot be planned.
    """
    cluster, global_batch = state.cluster, state.global_batch // number
    part = cluster.part(cluster.accelerators[: len(cluster) // number])
    request = replace(state.request, global_batch=global_batch, stages=len(part))
    try:
        sizes = tuple(microbatch_sizes(state.profile, part, request, global_batch))
        share = state.narrowed(request, sizes=sizes, cluster=part, to_copy=True)
        for run in (choose_sizes, try_sizes, reorder_pipelines):
            run(share)
    except BaPipeError:
        return []
    names = (*REPLICATED, *LOOPED)
    ranked = [
        own for own in share.incumbents.ranked() if own.short is None and own.candidate.schedule.name in names
    ]
    best = {own.candidate.schedule.name: own for own in reversed(ranked)}
    chosen = [own for own in ranked if own is best[own.candidate.schedule.name]]
    return chosen[: state.tuning.replicated_pipelines]
