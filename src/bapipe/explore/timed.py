"""Zero-bubble plans in an order made for their times, and the cuts that suit such an order.

The exact partition balances stages; an order that puts weight gradients off until a stage would wait allows more
work where there is more to put off. So the cuts are moved, several neighbours at a time, as long as that makes the
order shorter.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from bapipe.evaluate import Candidate, Evaluation, Hardware, StageChoice, evaluate, stage_costs
from bapipe.explore.caps import least_caps, live_bytes
from bapipe.schedule.timed_order import Preference, StageTimes, timed_order

__all__ = ["FEW_FORWARDS", "timed_plans"]

FEW_FORWARDS = 512
"""stages · micro-batches up to which such orders are tried: each takes milliseconds"""
_MOST_ORDERS = 240
"""that are made in search of better cuts"""
_SPARED = 0.05
"""share of the memory that such an order leaves alone: it takes all that it is given, for little, and what a stage
holds is not known more closely"""
_GAINS = 1e-4
"""share of the time that a move must save"""
_PREFERENCES = tuple(
    (Preference(forward_first=first, gap=gap), more)
    for first, gap, more in itertools.product((True, False), (0.5, 1.0), (0, 4, None))
)
"""what goes first, and micro-batches beyond the least K that may wait for their I; None: as many as there are"""

_Choice = tuple[Preference, int | None]


def timed_plans(start: Evaluation, hardware: Hardware, *, move_cuts: bool) -> Iterator[Evaluation]:
    """Evaluations of a straight pipeline's stages in orders made for them; with `move_cuts`, of others too."""
    candidate = start.candidate
    search = _Search(candidate, hardware)
    stages = candidate.stages
    choices = sorted(_PREFERENCES, key=lambda choice: search.seconds(stages, choice))
    for choice in choices[:3]:
        yield evaluate(search.candidate(stages, choice), hardware)
    if move_cuts:
        moved = search.moved(stages, choices[0])
        for choice in sorted(_PREFERENCES, key=lambda choice: search.seconds(moved, choice))[:3]:
            yield evaluate(search.candidate(moved, choice), hardware)


class _Search:
    """Orders of one pipeline on various cuts."""

    def __init__(self, candidate: Candidate, hardware: Hardware) -> None:
        self._start, self._hardware = candidate, hardware
        self._microbatches = candidate.schedule.num_microbatches
        self._known: dict[tuple[tuple[int, ...], _Choice], float] = {}

    def candidate(self, stages: tuple[StageChoice, ...], choice: _Choice) -> Candidate:
        schedule, _ = timed_order(self._times(stages, choice[1]), self._microbatches, choice[0])
        return replace(self._start, stages=stages, schedule=schedule)

    def seconds(self, stages: tuple[StageChoice, ...], choice: _Choice) -> float:
        key = tuple(stage.last for stage in stages), choice
        if key not in self._known:
            _, self._known[key] = timed_order(self._times(stages, choice[1]), self._microbatches, choice[0])
        return self._known[key]

    def moved(self, stages: tuple[StageChoice, ...], choice: _Choice) -> tuple[StageChoice, ...]:
        """The stages after all moves that pay, first of many units at once, then of fewer, at last of one."""
        best = self.seconds(stages, choice)
        units = len(self._start.chain)
        step = max(1, units // (4 * len(stages)))
        while step:
            found = None
            for trial in _moves(stages, step):
                if len(self._known) >= _MOST_ORDERS:
                    return stages
                seconds = self.seconds(trial, choice)
                if seconds < best * (1 - _GAINS):
                    best, found = seconds, trial
            stages, step = (found, step) if found else (stages, step // 2)
        return stages

    def _times(self, stages: tuple[StageChoice, ...], more: int | None) -> list[StageTimes]:
        chain, hardware = self._start.chain, self._hardware
        cluster, count = hardware.cluster, self._microbatches
        costs = stage_costs(replace(self._start, stages=stages), hardware)
        caps = least_caps(chain, stages, count, hardware)
        found = []
        for index, (stage, cap) in enumerate(zip(stages, caps, strict=True)):
            bytes_ = live_bytes(chain, stage, hardware)
            ahead = back = 0.0
            if index + 1 < len(stages):
                link = cluster.link(stage.accelerators[0], stages[index + 1].accelerators[0])
                ahead = costs.send_forward[index] / link.bandwidth + link.latency
            if index:
                link = cluster.link(stage.accelerators[0], stages[index - 1].accelerators[0])
                back = costs.send_backward[index - 1] / link.bandwidth + link.latency
            found.append(
                StageTimes(
                    forward=costs.forward[index],
                    input_gradient=costs.input_gradient[index],
                    weight_gradient=costs.weight_gradient[index],
                    send_forward=ahead,
                    send_backward=back,
                    # The first stage's errors go nowhere: what it does at once is its forwards.
                    cap=count if more is None or not index else min(count, cap + more),
                    live=bytes_.each,
                    delayed=bytes_.delayed,
                    room=bytes_.room - _SPARED * cluster.type_of(stage.accelerators[0]).memory,
                )
            )
        return found


def _moves(stages: Sequence[StageChoice], step: int) -> Iterator[tuple[StageChoice, ...]]:
    """The stages with one cut, or several neighbouring ones, so many units earlier or later."""
    cuts = [stage.last for stage in stages]
    for first, last in itertools.combinations_with_replacement(range(len(cuts) - 1), 2):
        for by in (-step, step):
            moved = [cut + by if first <= index <= last else cut for index, cut in enumerate(cuts)]
            if all(before < after for before, after in itertools.pairwise([-1, *moved])):
                begins = [0, *(cut + 1 for cut in moved[:-1])]
                yield tuple(
                    replace(stage, first=begin, last=end)
                    for stage, begin, end in zip(stages, begins, moved, strict=True)
                )
