"""Orders of pipelines whose ranks have several stages each, for given times: what is ready runs by a preference.

Stages go over the ranks round after round, and a rank may have fewer rounds than another. Ranks with 2, 2 and 1:

    rank 0   0 ↘       3 ↘         stage 3 is the second of rank 0, and 4 of rank 1
    rank 1      1 ↘       4
    rank 2         2 ↗

No fixed pattern is known for unequal numbers, or for stages that take unequally long; so several orders are made,
one by each choice of what goes first and how much is held, and whoever asks takes the fastest that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bapipe.errors import BaPipeError
from bapipe.schedule.actions import Kind, Lane, Schedule
from bapipe.schedule.lane_builders import require_sizes

__all__ = ["LOOPED_CHOICES", "LoopedChoice", "LoopedStage", "looped_order", "looped_placement", "looped_warm_up"]

_F, _B = int(Kind.F), int(Kind.B)
_NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopedStage:
    """What the order is made for, of one stage."""

    rank: int
    forward: float
    backward: float
    send_forward: float = 0.0
    """seconds to the next stage, where that is on another rank"""
    send_backward: float = 0.0
    """seconds to the stage before, where that is on another rank"""
    inflight: float = 0.0
    """bytes of a micro-batch that waits for its backward"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopedChoice:
    """What goes first where there is a choice, and how much is held; none is best for all times."""

    limit: float = 1.0
    """times the activations of interleaved 1F1B's warm-up that a rank may hold"""
    backward_first: bool = False
    deep_first: bool = True
    """of forwards, and of backwards, those of later stages first; else the ones that are ready longest"""


LOOPED_CHOICES = (
    LoopedChoice(),
    LoopedChoice(limit=1.5),
    LoopedChoice(limit=0.7),
    LoopedChoice(deep_first=False),
    LoopedChoice(limit=1.5, deep_first=False),
    LoopedChoice(backward_first=True),
    LoopedChoice(limit=1.5, backward_first=True),
)
"""those that are shortest for some times; the first has the published order of equal stages where N divides M"""


def looped_placement(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The rank of each stage where rank r has counts[r]: round after round, each as long as it lacks stages."""
    if not counts or min(counts) < 1:
        raise BaPipeError(f"every rank needs at least 1 stage, got {list(counts)[:16]}; raise --virtual")
    return tuple((rank,) for turn in range(max(counts)) for rank, own in enumerate(counts) if own > turn)


def looped_warm_up(placement: Sequence[tuple[int, ...]]) -> list[int]:
    """Forwards of each rank before its first backward, as interleaved 1F1B has them.

    A group of N micro-batches through all own stages but the last, and two for every stage after that one:
    (v_r−1)·N + 2·(S−1−ℓ_r); of equal numbers 2(N−r−1) + (v−1)N.
    """
    ranks = 1 + max(rank for (rank,) in placement)
    last = len(placement) - 1
    own = [[stage for stage, (rank,) in enumerate(placement) if rank == index] for index in range(ranks)]
    return [(len(stages) - 1) * ranks + 2 * (last - stages[-1]) for stages in own]


def looped_order(
    stages: Sequence[LoopedStage],
    num_microbatches: int,
    choice: LoopedChoice,
    *,
    room: Sequence[float] | None = None,
) -> tuple[Schedule, float]:
    """The order by one choice, and its seconds.

    `room`: bytes that each rank has for activations; an order exceeds them only by what a rank needs to go on at
    all. Whether channels of few messages would stop it is to be asked (`channel_window`). Cost: some microseconds
    per action.
    """
    placement = tuple((stage.rank,) for stage in stages)
    warm = looped_warm_up(placement)
    require_sizes(len(warm), num_microbatches)
    most = [max(1, round(choice.limit * (own + 1))) for own in warm]
    ranks, seconds = _listed(stages, num_microbatches, most, room, choice)
    return _schedule(placement, ranks, num_microbatches), seconds


def _schedule(placement: tuple[tuple[int, ...], ...], ranks: Sequence[_LoopedRank], count: int) -> Schedule:
    lanes = []
    for index, rank in enumerate(ranks):
        table = np.array(rank.actions, dtype=np.int64).reshape(-1, 3)
        lanes.append(Lane(index, table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy()))
    return Schedule(
        name="interleaved",
        num_stages=len(placement),
        num_microbatches=count,
        placement=placement,
        lanes=tuple(lanes),
    )


def _listed(
    stages: Sequence[LoopedStage],
    count: int,
    most: Sequence[int],
    room: Sequence[float] | None,
    choice: LoopedChoice,
) -> tuple[list[_LoopedRank], float]:
    """The ranks after they have always run what comes first, as they prefer it; and when the last is done."""
    ranks = [
        _LoopedRank(
            [stage for stage, own in enumerate(stages) if own.rank == index],
            stages,
            count,
            limit,
            _NEVER if room is None else room[index],
            choice,
        )
        for index, limit in enumerate(most)
    ]
    last = len(stages) - 1
    ranks[stages[0].rank].forward_at[0] = [0.0] * count
    options = [rank.option() for rank in ranks]
    for _ in range(2 * len(stages) * count):
        start, _, _, kind, stage = soonest = min(options)
        assert start < _NEVER, "every rank waits for another"
        index = options.index(soonest)
        microbatch, end = ranks[index].run(start, kind, stage)
        target = stage + 1 if kind == _F else stage - 1
        if kind == _F and stage == last:
            ranks[index].backward_at[stage][microbatch] = end
        elif 0 <= target <= last:
            peer = stages[target].rank
            sent = stages[stage].send_forward if kind == _F else stages[stage].send_backward
            there = end + (sent if peer != index else 0.0)
            (ranks[peer].forward_at if kind == _F else ranks[peer].backward_at)[target][microbatch] = there
            options[peer] = ranks[peer].option()
        options[index] = ranks[index].option()
    return ranks, max(rank.free for rank in ranks)


class _LoopedRank:
    """One rank while the order is made.

    A forward leaves room for one of every later stage of the rank, and there always is room for the only
    micro-batch of a stage and of those after it. So a stage waits for memory only where it or a later one holds
    some, which comes free once the stages behind it go on: no order waits for ever.
    """

    def __init__(
        self,
        own: Sequence[int],
        stages: Sequence[LoopedStage],
        count: int,
        most: int,
        room: float,
        choice: LoopedChoice,
    ) -> None:
        self._own, self._stages, self._count = tuple(own), stages, count
        self._most, self._room, self._prefers = max(most, len(own)), room, choice
        self.forward_at = {stage: [_NEVER] * count for stage in own}
        """when each micro-batch's input is there"""
        self.backward_at = {stage: [_NEVER] * count for stage in own}
        self.actions: list[tuple[int, int, int]] = []
        """kind, stage and micro-batch"""
        self.free = 0.0
        self._forwards = dict.fromkeys(own, 0)
        self._backwards = dict.fromkeys(own, 0)

    def option(self) -> tuple[float, int, float, int, int]:
        """When it would begin what next, by what is known: start, preference twice, kind and stage."""
        best: tuple[float, int, float, int, int] = (_NEVER, 0, 0.0, _F, -1)
        for place, stage in enumerate(self._own):
            at = self._forwards[stage]
            if at < self._count and self.forward_at[stage][at] < _NEVER and self._fits(place):
                best = min(best, self._offer(self.forward_at[stage][at], _F, stage))
            at = self._backwards[stage]
            if at < self._forwards[stage] and self.backward_at[stage][at] < _NEVER:
                best = min(best, self._offer(self.backward_at[stage][at], _B, stage))
        return best

    def _offer(self, ready: float, kind: int, stage: int) -> tuple[float, int, float, int, int]:
        first = int((kind == _F) == self._prefers.backward_first)
        return max(self.free, ready), first, -float(stage) if self._prefers.deep_first else ready, kind, stage

    def run(self, start: float, kind: int, stage: int) -> tuple[int, float]:
        """Do what was chosen; its micro-batch and its end."""
        done = self._forwards if kind == _F else self._backwards
        microbatch = done[stage]
        done[stage] += 1
        own = self._stages[stage]
        self.free = start + (own.forward if kind == _F else own.backward)
        self.actions.append((kind, stage, microbatch))
        return microbatch, self.free

    def _fits(self, place: int) -> bool:
        """Whether there is memory for a forward of one of its stages, and for one of each later stage."""
        held = [self._forwards[stage] - self._backwards[stage] for stage in self._own]
        if not any(held[place:]):
            return True
        now = sum(number * self._stages[stage].inflight for number, stage in zip(held, self._own, strict=True))
        needed = now + sum(self._stages[stage].inflight for stage in self._own[place:])
        return sum(held) + len(self._own) - place <= self._most and needed <= self._room
