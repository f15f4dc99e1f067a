"""Zero-bubble plans in an order made for their times, and the cuts that suit such an order.

The exact partition balances stages; an order that defers weight gradients until a stage would wait allows more
work where there is more to defer. So the cuts are moved, several neighbours at a time, as long as that makes the
order shorter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from bapipe.costs.segments import Chain
from bapipe.planner.candidate import Candidate, Hardware, StageChoice, unreplicated
from bapipe.planner.evaluate import Evaluation, evaluate
from bapipe.planner.inflight_caps import least_caps
from bapipe.planner.intra_layer_cuts import refined, staggered_stages
from bapipe.planner.order_times import order_times
from bapipe.planner.partition.paper.intra_layer import translate
from bapipe.planner.pipelines import FAMILIES, with_cuts
from bapipe.planner.tuning import DEFAULT_TUNING, Tuning
from bapipe.schedule.actions import Schedule
from bapipe.schedule.list_schedule import Preference, StageTimes, timed_order

__all__ = ["Moves", "orders_under", "takes_orders", "timed_plans"]

_CHOICES = tuple(
    (Preference(forward_first=first, gap=gap), more)
    for first, gap, more in itertools.product((True, False), (0.0, 0.5), (0, 2, 4, None))
)
"""what goes first, and micro-batches beyond the least K that may wait for their I; None: as many as there are"""

Moves = Literal["none", "layers", "slices"]
_Choice = tuple[Preference, int | None]
_Cuts = tuple[int, ...]


def timed_plans(
    start: Evaluation, hardware: Hardware, *, moves: Moves, tuning: Tuning = DEFAULT_TUNING
) -> list[Evaluation]:
    """Evaluations of a pipeline's stages in orders made for them, and of stages with moved cuts.

    `moves`: cuts are moved by the units that there are, or by slices of all layers that may be divided.
    """
    candidate = _in_slices(start.candidate, tuning.slices) if moves == "slices" else start.candidate
    search = _Search(candidate, hardware, tuning)
    stages = candidate.stages
    tried = [stages]
    if moves == "layers":
        tried.append(search.moved(stages, search.quickest(stages)[0], most=tuning.layer_orders))
    elif moves == "slices":
        family, count = FAMILIES["zb"], candidate.schedule.num_microbatches
        staggered = staggered_stages(candidate.chain, stages, hardware, family, count)
        for cut in (stages, *([] if staggered is None else [tuple(staggered)])):
            tried += [cut, search.moved(cut, search.quickest(cut)[0], most=tuning.slice_orders)]
    found = []
    for cut in dict.fromkeys(tried):
        choices = search.quickest(cut)[: tuning.orders_simulated]
        found += [evaluate(search.candidate(cut, choice), hardware) for choice in choices]
    return found


def takes_orders(start: Evaluation, tuning: Tuning) -> bool:
    """Whether it is a pipeline that a zero-bubble order can be made for with little work, and any cut moved."""
    stages, schedule = start.candidate.stages, start.candidate.schedule
    if not unreplicated(stages) or not len(stages) == schedule.num_ranks > 1:
        return False
    small = len(stages) * schedule.num_microbatches <= tuning.order_size
    alone = all(first == last for first, last in start.candidate.chain.recompute)
    return small and alone and not any(stage.recompute for stage in stages)


def orders_under(
    candidate: Candidate, hardware: Hardware, others: Sequence[tuple[Chain, Hardware]], tuning: Tuning
) -> Iterator[Candidate]:
    """The candidate's stages in the orders made for its times, and in one made for each of other times.

    An order is as long as its times were when it was made: under others one that waits less may be shorter.
    """
    search = _Search(candidate, hardware, tuning)
    choices = search.quickest(candidate.stages)[: tuning.orders_simulated]
    yield from (search.candidate(candidate.stages, choice) for choice in choices)
    for chain, changed in others:
        other = _Search(replace(candidate, chain=chain), changed, tuning)
        quickest = min(
            choices[: tuning.sampled_choices], key=lambda choice: other.seconds(candidate.stages, choice)
        )
        yield replace(other.candidate(candidate.stages, quickest), chain=candidate.chain)


def _in_slices(candidate: Candidate, slices: int) -> Candidate:
    """The same stages on the chain in which every layer that may be divided is in slices."""
    chain = candidate.chain
    if not all(unit.whole for unit in chain.units):
        return candidate
    finer = refined(chain, slices)
    cuts = translate(tuple(stage.last for stage in candidate.stages), chain, finer)
    return replace(candidate, chain=finer, stages=with_cuts(candidate.stages, cuts))


class _Search:
    """Orders of one pipeline on various cuts."""

    def __init__(self, candidate: Candidate, hardware: Hardware, tuning: Tuning) -> None:
        self._start, self._hardware, self._tuning = candidate, hardware, tuning
        self._microbatches = candidate.schedule.num_microbatches
        self._bases: dict[_Cuts, list[StageTimes]] = {}
        self._orders: dict[tuple[_Cuts, _Choice], tuple[Schedule, float]] = {}

    def candidate(self, stages: tuple[StageChoice, ...], choice: _Choice) -> Candidate:
        schedule, _ = self._order(stages, choice)
        return replace(self._start, label=f"zb, {len(stages)} stages", stages=stages, schedule=schedule)

    def seconds(self, stages: tuple[StageChoice, ...], choice: _Choice) -> float:
        return self._order(stages, choice)[1]

    def _order(self, stages: tuple[StageChoice, ...], choice: _Choice) -> tuple[Schedule, float]:
        cuts = tuple(stage.last for stage in stages)
        key = cuts, choice
        if key not in self._orders:
            if cuts not in self._bases:
                self._bases[cuts] = self._base(stages)
            (preference, more), count = choice, self._microbatches
            times = [
                replace(item, cap=count if more is None else min(count, item.cap + more))
                for item in self._bases[cuts]
            ]
            self._orders[key] = timed_order(times, count, preference)
        return self._orders[key]

    def quickest(self, stages: tuple[StageChoice, ...]) -> list[_Choice]:
        """All choices, from the one with the shortest order on."""
        return sorted(_CHOICES, key=lambda choice: self.seconds(stages, choice))

    def moved(self, stages: tuple[StageChoice, ...], choice: _Choice, *, most: int) -> tuple[StageChoice, ...]:
        """The stages after all moves that pay, first of many units at once, then of fewer, at last of one."""
        best, most = self.seconds(stages, choice), len(self._orders) + most
        units = len(self._start.chain)
        step = max(1, units // (2 * len(stages)))
        while step:
            before = best
            for move in _moves(len(stages), step):
                trial = _moved(stages, move)
                if trial is None:
                    continue
                if len(self._orders) >= most:
                    return stages
                seconds = self.seconds(trial, choice)
                if seconds < best * (1 - self._tuning.order_gain):
                    best, stages = seconds, trial
            if best == before:
                step //= 2
        return stages

    def _base(self, stages: tuple[StageChoice, ...]) -> list[StageTimes]:
        """What an order of these stages is made for, with the least K."""
        chain, hardware, tuning = self._start.chain, self._hardware, self._tuning
        caps = least_caps(chain, stages, self._microbatches, hardware)
        times = order_times(replace(self._start, stages=stages), hardware, tuning)
        return [replace(own, cap=cap) for own, cap in zip(times, caps, strict=True)]


def _moves(stages: int, step: int) -> Iterator[list[int]]:
    """By how many units each cut goes on: one of them, or several neighbouring ones, forth or back."""
    for first, last in itertools.combinations_with_replacement(range(stages - 1), 2):
        for by in (-step, step):
            yield [by if first <= index <= last else 0 for index in range(stages)]


def _moved(stages: Sequence[StageChoice], move: Sequence[int]) -> tuple[StageChoice, ...] | None:
    """None where a stage would have nothing left."""
    cuts = [stage.last + by for stage, by in zip(stages, move, strict=True)]
    stay = all(before < after for before, after in itertools.pairwise([-1, *cuts]))
    return with_cuts(stages, cuts) if stay else None
