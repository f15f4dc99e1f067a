"""Passes over one family of schedules at one micro-batch size: each tries the partitions of one origin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bapipe.costs.segments import Chain
from bapipe.planner.candidate import StageChoice, is_data_parallel, unreplicated
from bapipe.planner.exact_stages import exact_stages, tries_replicas
from bapipe.planner.fixed_partitions import fixed_partitions, paper_candidate
from bapipe.planner.hybrids import balanced_hybrids
from bapipe.planner.pipelines import Family, build
from bapipe.planner.state import SearchState, SizeScope

__all__ = [
    "FAMILY_PASSES",
    "FamilyScope",
    "SharedPartitions",
    "reuse_cuts",
    "try_baselines",
    "try_exact",
    "try_hybrids",
    "try_paper",
]


@dataclass(slots=True, eq=False)
class SharedPartitions:
    """Partitions that several families of one micro-batch size and depth try."""

    baselines: list[tuple[StageChoice, ...]]
    """what other systems' rules cut"""
    plain: list[tuple[Chain, list[StageChoice]]] = field(default_factory=list)
    """the exact cuts of 1f1b without replicas and recomputation, which are zb's as well"""
    hybrids: list[tuple[float, tuple[StageChoice, ...]]] = field(default_factory=list)
    """balanced hybrids with their seconds by the formula, once a family has asked for them"""

    @classmethod
    def of(cls, state: SearchState, scope: SizeScope) -> SharedPartitions:
        return cls(fixed_partitions(scope.chain, state.hardware, scope.request, state.tuning))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FamilyScope:
    """One family of schedules at one micro-batch size."""

    size: SizeScope
    name: str
    family: Family
    shared: SharedPartitions

    def consider(self, state: SearchState, chain: Chain, stages: Sequence[StageChoice]) -> None:
        """Simulate these stages under the family's schedule."""
        candidate = build(chain, stages, self.family, self.size.microbatches, state.hardware, state.tuning)
        state.consider(self.competes_in(stages), candidate)

    def competes_in(self, stages: Sequence[StageChoice]) -> str:
        """The family in which the best of such stages is kept: pipelines with replicas compete apart."""
        return self.name if unreplicated(stages) else f"{self.name}, hybrid"


def reuse_cuts(state: SearchState, scope: FamilyScope) -> bool:
    """Add zb on the cuts of 1f1b, and say whether there were any: the exact partition of both is the same."""
    if scope.name != "zb" or not scope.shared.plain:
        return False
    for chain, stages in scope.shared.plain:
        scope.consider(state, chain, stages)
    return True


def try_baselines(state: SearchState, scope: FamilyScope) -> None:
    """Add what other systems' rules cut: uniform, by parameters, by time, PipeDream's."""
    for stages in scope.shared.baselines:
        if (unreplicated(stages) or scope.family.replicas) and not is_data_parallel(stages):
            again = scope.family.recompute == "always"
            scope.consider(state, scope.size.chain, tuple(replace(stage, recompute=again) for stage in stages))


def try_exact(state: SearchState, scope: FamilyScope) -> None:
    """Add the exact partition, for PP and PP × DP, whole layers and split ones."""
    if scope.size.request.strategy not in ("exact", "gpipe"):
        return
    for chain, stages in exact_stages(state, scope.size, scope.family):
        if is_data_parallel(stages):
            continue  # a candidate of its own
        if scope.name == "1f1b" and unreplicated(stages) and not any(stage.recompute for stage in stages):
            scope.shared.plain.append((chain, stages))
        scope.consider(state, chain, stages)


def try_hybrids(state: SearchState, scope: FamilyScope) -> None:
    """Add few stages with replicas, balanced by a formula, where that comes near the schedule's best so far."""
    request, chain = scope.size.request, scope.size.chain
    if request.strategy not in ("exact", "gpipe") or state.paper or request.stages is not None:
        return
    if not tries_replicas(state, chain, scope.family):
        return
    shared = scope.shared
    shared.hybrids = shared.hybrids or balanced_hybrids(
        chain, state.hardware, scope.size.microbatches, state.tuning
    )
    best = state.incumbents.best_of(scope.family.schedule)
    within = math.inf if best is None else state.tuning.near_best * best.time
    for time, stages in shared.hybrids:
        if time <= within:
            scope.consider(state, chain, stages)


def try_paper(state: SearchState, scope: FamilyScope) -> None:
    """Add the paper's balanced partition, with the record of its steps."""
    request, chain = scope.size.request, scope.size.chain
    if request.strategy == "bapipe" or (request.strategy == "exact" and state.thorough(len(chain))):
        candidate = paper_candidate(
            chain,
            state.hardware,
            scope.family,
            scope.size.microbatches,
            request,
            state.tuning,
            fitting=request.strategy == "exact",
        )
        if candidate is not None:
            state.consider(scope.competes_in(candidate.stages), candidate)


FAMILY_PASSES = (try_baselines, try_exact, try_hybrids, try_paper)
"""what is tried under each family of schedules, in this order"""
