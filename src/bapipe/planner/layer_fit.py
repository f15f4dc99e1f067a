"""A candidate that lacks memory, made to fit: the layers that recompute on each rank, chosen and simulated.

`choose_runs` goes by a formula of what a rank holds; what the timeline says besides (messages, gradients that are
not there yet) is the difference to the simulated peak, which is taken to stay as it is and corrected by simulating
again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bapipe.costs.recomputed_layers import recomputing
from bapipe.costs.segments import Chain, Run
from bapipe.planner.candidate import Candidate, Hardware, layers_recomputing
from bapipe.planner.evaluate import Evaluation, evaluate
from bapipe.planner.layer_choice import RunChoices, Span, UnitNeeds, held_bytes, least_repeated

__all__ = ["fitted_by_layers", "without_recomputation"]

_TRIES = 6
"""times that a choice is simulated and corrected"""
_SAFE = 1 + 1e-9
_NAMED = re.compile(r", (\d+ )?recomputing(?=,|$)| with recomputation|, \d+ layers? recomputing(?=,|$)")


@dataclass(slots=True, kw_only=True, eq=False)
class _Rank:
    """The stages of one accelerator, or of the replicas of one."""

    stages: tuple[int, ...]
    needs: UnitNeeds
    spans: tuple[Span, ...]
    runs: tuple[Run, ...] = ()
    busy: float = 0.0
    """seconds of a step that its replica with most micro-batches works at least, without what it repeats; 0: not
    known"""
    taken: int = 0
    """micro-batches of that replica"""
    repeated: float = 0.0
    """seconds per micro-batch"""

    def works(self, repeated: float) -> float:
        """Seconds of a step with so many repeated per micro-batch."""
        return self.busy + self.taken * repeated

    def formula(self) -> float:
        return held_bytes(self.needs, self.spans, self.runs)


def without_recomputation(candidate: Candidate, chain: Chain) -> Candidate:
    """The same candidate with no stage and no layer that recomputes, to choose layers for."""
    stages = tuple(replace(stage, recompute=False) for stage in candidate.stages)
    return replace(candidate, chain=chain, stages=stages, label=_NAMED.sub("", candidate.label))


def fitted_by_layers(
    plain: Evaluation, hardware: Hardware, *, below: float = math.inf, choices: RunChoices | None = None
) -> Evaluation:
    """The fastest found of the same stages under the same schedule with layers that recompute, so that all fits.

    Where that cannot be, the one that lacks least. `plain` has none that recompute; it is returned where it fits,
    and where what a rank has to do takes longer than `below` seconds of a step.
    Cost: that of a few simulations, and of one choice each for every rank that lacks memory and is not among the
    `choices` made before.
    """
    if plain.short is None:
        return plain
    candidate, chain = plain.candidate, plain.candidate.chain
    choices = choices or RunChoices()
    ranks = _ranks(plain, hardware, choices)
    if any(rank.works(_least(rank, plain)) >= below for rank in ranks):
        return plain
    best, current = plain, plain
    seen = {_all_runs(ranks)}
    for _ in range(_TRIES):
        for rank in ranks:
            _choose(rank, current, choices)
            if rank.works(rank.repeated) >= below:
                return best
        runs = _all_runs(ranks)
        if runs in seen:
            break
        seen.add(runs)
        current = evaluate(_recomputing(candidate, chain, runs), hardware)
        if _better(current, best):
            best = current
    return best


def _choose(rank: _Rank, current: Evaluation, choices: RunChoices) -> None:
    """The rank's runs, given what the last choice turned out to hold."""
    lacks = _lacks(rank, current)
    if lacks <= 0 and not rank.runs:
        return
    room = rank.formula() - lacks
    found = choices.choose(rank.needs, rank.spans, room)
    if found is None:
        found = choices.choose(rank.needs, rank.spans, room, least_bytes=True)
    assert found is not None
    rank.runs, rank.repeated = found.runs, found.seconds


def _lacks(rank: _Rank, current: Evaluation) -> float:
    """Bytes that it holds beyond its memory; less than 0 where it has some to spare."""
    peaks = ((current.memory[stage], current.capacity[stage]) for stage in rank.stages)
    peak, capacity = max(peaks, key=lambda own: own[0] - own[1])
    return peak * _SAFE - capacity if peak > capacity else peak - capacity


def _least(rank: _Rank, plain: Evaluation) -> float:
    """Seconds per micro-batch that it must repeat at least."""
    return least_repeated(rank.needs, rank.spans, rank.formula() - _lacks(rank, plain))


def _better(one: Evaluation, other: Evaluation) -> bool:
    lacks, other_lacks = (0.0 if own.short is None else own.short[1] for own in (one, other))
    return (lacks, -one.throughput) < (other_lacks, -other.throughput)


def _ranks(plain: Evaluation, hardware: Hardware, choices: RunChoices) -> list[_Rank]:
    candidate, chain = plain.candidate, plain.candidate.chain
    by_members: dict[tuple[int, ...], list[int]] = {}
    for index, stage in enumerate(candidate.stages):
        by_members.setdefault(stage.accelerators, []).append(index)
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
        rank = _Rank(stages=tuple(stages), needs=choices.needs(chain, row), spans=spans)
        if plain.schedule.dealing is None:
            seconds, number = plain.stage_seconds, len(members) // candidate.copies
            rank.taken = -(-candidate.schedule.num_microbatches // number)
            rank.busy = rank.taken * sum(float(seconds.forward[at] + seconds.backward[at]) for at in stages)
        found.append(rank)
    return found


def _all_runs(ranks: Sequence[_Rank]) -> tuple[Run, ...]:
    return tuple(sorted(run for rank in ranks for run in rank.runs))


def _recomputing(candidate: Candidate, chain: Chain, runs: tuple[Run, ...]) -> Candidate:
    chain = recomputing(chain, runs)
    return replace(candidate, chain=chain, label=candidate.label + layers_recomputing(chain), steps=())
