"""The exact partition as candidates' stages: PP, PP × DP, and with layers split between stages."""

from __future__ import annotations

from bapipe.costs.segments import Chain
from bapipe.errors import InfeasibleError
from bapipe.planner.candidate import StageChoice
from bapipe.planner.intra_layer_cuts import refined, split_stages, splits_everywhere
from bapipe.planner.partition.paper.intra_layer import refine
from bapipe.planner.pipelines import Family, optimal, require_layers
from bapipe.planner.state import SearchState, SizeScope

__all__ = ["exact_stages", "tries_replicas"]


def tries_replicas(state: SearchState, chain: Chain, family: Family) -> bool:
    """Whether stages may be replicated under this family.

    Replicas make the search slow; a large problem tries them under the schedule that gains most by them.
    """
    return family.replicas and (state.thorough(len(chain)) or family.schedule == "1f1b-so")


def exact_stages(state: SearchState, scope: SizeScope, family: Family) -> list[tuple[Chain, list[StageChoice]]]:
    """The optimal stages of a family, each with the chain that they cut.

    For the links within a node and between nodes, or of every level: without replicas, with them, and with layers
    split where that is asked for. Where nothing fits, the optimum without a memory limit, so that what is short
    can be named.
    """
    chain, request, hardware = scope.chain, scope.request, state.hardware
    count = len(state.cluster)
    depth = request.stages or (count if state.paper else None)
    if depth is not None:
        require_layers(chain, depth)
    wide = tries_replicas(state, chain, family) and not state.paper and depth is None and count > 1
    found: list[tuple[Chain, list[StageChoice]]] = []
    for link in state.cluster.stage_links:
        for replicas in (False, True) if wide else (False,):
            try:
                stages = optimal(
                    chain,
                    hardware,
                    family,
                    scope.microbatches,
                    num_stages=depth,
                    replicas=replicas,
                    link=link,
                    tuning=state.tuning,
                )
            except InfeasibleError:
                if replicas or (not state.thorough(len(chain)) and request.schedule is None):
                    continue
                stages = optimal(
                    chain,
                    hardware,
                    family,
                    scope.microbatches,
                    num_stages=depth or min(count, len(chain)),
                    unlimited=True,
                    link=link,
                    tuning=state.tuning,
                )
            found.append((chain, stages))
            if request.split_layers and not replicas:
                finer = _finer(state, scope, stages)
                if finer is not None:
                    found += split_stages(
                        finer, stages, hardware, family, scope.microbatches, link=link, tuning=state.tuning
                    )
    return found


def _finer(state: SearchState, scope: SizeScope, stages: list[StageChoice]) -> Chain | None:
    """The chain with layers in slices: those next to the cuts; all, at a given depth, where that is not much."""
    chain, slices = scope.chain, state.tuning.slices
    if splits_everywhere(chain, state.hardware, scope.request, state.tuning):
        at_depth = scope.request.stages is not None or state.paper
        return refined(chain, slices) if at_depth else None
    cuts = [stage.last for stage in stages[:-1]]
    beside = sorted({chain.units[unit].layer for cut in cuts for unit in (cut, cut + 1)})
    return refine(chain, beside, slices)
