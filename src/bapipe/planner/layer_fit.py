"""A candidate that lacks memory, made to fit: the layers that recompute on each rank, chosen and simulated.

`choose_runs` goes by a formula of what a rank holds; what the timeline says besides (messages, gradients that are
not there yet) is the difference to the simulated peak, which is taken to stay as it is and corrected by simulating
again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bapipe.costs.recomputed_layers import recomputing
from bapipe.costs.segments import Chain, Run
from bapipe.planner.candidate import Candidate, Hardware
from bapipe.planner.evaluate import Evaluation, evaluate
from bapipe.planner.layer_choice import ChosenRuns, Span, UnitNeeds, choose_runs, held_bytes, unit_needs

__all__ = ["fitted_by_layers", "without_recomputation"]

_TRIES = 6
"""times that a choice is simulated and corrected"""
_SAFE = 1 + 1e-9
_NAMED = re.compile(r", (\d+ )?recomputing(?=,|$)| with recomputation|, \d+ layers? recomput\w+$")


@dataclass(slots=True, kw_only=True, eq=False)
class _Rank:
    """The stages of one accelerator, or of the replicas of one."""

    stages: tuple[int, ...]
    needs: UnitNeeds
    spans: tuple[Span, ...]
    runs: tuple[Run, ...] = ()

    def formula(self) -> float:
        return held_bytes(self.needs, self.spans, self.runs)


def without_recomputation(candidate: Candidate) -> Candidate:
    """The same candidate with no stage that recomputes, to choose layers for."""
    stages = tuple(replace(stage, recompute=False) for stage in candidate.stages)
    return replace(candidate, stages=stages, label=_NAMED.sub("", candidate.label))


def fitted_by_layers(plain: Evaluation, hardware: Hardware) -> Evaluation:
    """The fastest found of the same stages under the same schedule with layers that recompute, so that all fits.

    Where that cannot be, the one that lacks least. `plain` has none that recompute; it is returned where it fits.
    Cost: that of a few simulations, and of one choice each for every rank that lacks memory.
    """
    if plain.short is None:
        return plain
    candidate, chain = plain.candidate, plain.candidate.chain
    ranks = _ranks(plain, hardware)
    best, current = plain, plain
    seen = {_all_runs(ranks)}
    for _ in range(_TRIES):
        for rank in ranks:
            _choose(rank, current)
        runs = _all_runs(ranks)
        if runs in seen:
            break
        seen.add(runs)
        current = evaluate(_recomputing(candidate, chain, runs), hardware)
        if _better(current, best):
            best = current
    return best


def _choose(rank: _Rank, current: Evaluation) -> None:
    """The rank's runs, given what the last choice turned out to hold."""
    peak, capacity = max(
        ((current.memory[stage], current.capacity[stage]) for stage in rank.stages),
        key=lambda own: own[0] - own[1],
    )
    if peak <= capacity and not rank.runs:
        return
    room = rank.formula() + (capacity - peak * _SAFE)
    found: ChosenRuns | None = choose_runs(rank.needs, rank.spans, room)
    if found is None:
        found = choose_runs(rank.needs, rank.spans, room, least_bytes=True)
    assert found is not None
    rank.runs = found.runs


def _better(one: Evaluation, other: Evaluation) -> bool:
    lacks, other_lacks = (0.0 if own.short is None else own.short[1] for own in (one, other))
    return (lacks, -one.throughput) < (other_lacks, -other.throughput)


def _ranks(plain: Evaluation, hardware: Hardware) -> list[_Rank]:
    candidate, chain = plain.candidate, plain.candidate.chain
    by_members: dict[tuple[int, ...], list[int]] = {}
    for index, stage in enumerate(candidate.stages):
        by_members.setdefault(stage.accelerators, []).append(index)
    needs: dict[int, UnitNeeds] = {}
    found, inflight = [], plain.inflight
    for members, stages in by_members.items():
        rows = {chain.row(hardware.cluster.accelerators[index].type) for index in members}
        row = max(rows, key=lambda own: float(chain.forward[own].sum()))
        spans = tuple(
            Span(
                first=candidate.stages[index].first,
                last=candidate.stages[index].last,
                inflight=max(1.0, inflight[index]),
            )
            for index in stages
        )
        if row not in needs:
            needs[row] = unit_needs(chain, row)
        found.append(_Rank(stages=tuple(stages), needs=needs[row], spans=spans))
    return found


def _all_runs(ranks: Sequence[_Rank]) -> tuple[Run, ...]:
    return tuple(sorted(run for rank in ranks for run in rank.runs))


def _recomputing(candidate: Candidate, chain: Chain, runs: tuple[Run, ...]) -> Candidate:
    count = sum(last - first + 1 for first, last in runs)
    named = f", {count} layer{'s' * (count > 1)} recomputing" if runs else ""
    return replace(candidate, chain=recomputing(chain, runs), label=candidate.label + named, steps=())
