"""Orders of pipelines whose ranks have several stages each, for given times: what is ready runs by a preference.

Stages go over the ranks round after round, and a rank may have fewer rounds than another. Ranks with 2, 2 and 1:

    rank 0   0 ↘       3 ↘         stage 3 is the second of rank 0, and 4 of rank 1
    rank 1      1 ↘       4
    rank 2         2 ↗

No fixed pattern is known for unequal numbers, or for stages that take unequally long; so several orders are made,
one by each choice of what goes first and how much is held, and whoever asks takes the fastest that fits.

Such an order gets shorter by justifying it twice (Valls, Ballestín and Quintanilla 2005): from its end back, every
action is put as late as it may be, and then from the begin on as early, those first that began first. The first of
both is the same list of a pipeline whose time runs backwards, where what was the backward comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bapipe.errors import BaPipeError
from bapipe.schedule.actions import Lane, Schedule
from bapipe.schedule.lane_builders import require_sizes
from bapipe.schedule.listing_kernel import list_actions

__all__ = [
    "LOOPED_CHOICES",
    "LoopedChoice",
    "LoopedStage",
    "justified_order",
    "looped_order",
    "looped_placement",
    "looped_warm_up",
]

_NEVER = float("inf")
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


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
    made = _listed(stages, num_microbatches, choice.limit, room, choice)
    return _schedule(stages, made, num_microbatches), made.seconds


def justified_order(
    stages: Sequence[LoopedStage],
    num_microbatches: int,
    choice: LoopedChoice,
    *,
    limit: float = _NEVER,
    room: Sequence[float] | None = None,
    rounds: int = 4,
) -> tuple[Schedule, float]:
    """The order by one choice, justified twice in so many rounds at most, and its seconds.

    `limit` times the activations of interleaved 1F1B's warm-up are what a rank may then hold, and `room` as for
    `looped_order`. Cost: that of one of its orders, and of two more for every round.
    """
    backwards = _backwards(stages)
    best = made = _listed(stages, num_microbatches, choice.limit, room, choice)
    for _ in range(rounds):
        before = made.seconds
        late = _listed(backwards, num_microbatches, limit, room, _mirrored(made.ends))
        made = _listed(stages, num_microbatches, limit, room, _mirrored(late.ends))
        if made.seconds < best.seconds:
            best = made
        if made.seconds == before:
            break
    return _schedule(stages, best, num_microbatches), best.seconds


def _backwards(stages: Sequence[LoopedStage]) -> list[LoopedStage]:
    """The pipeline as it looks where time runs backwards."""
    last = len(stages) - 1
    return [
        LoopedStage(
            rank=own.rank,
            forward=own.backward,
            backward=own.forward,
            send_forward=stages[index + 1].send_backward if index < last else 0.0,
            send_backward=stages[index - 1].send_forward if index else 0.0,
            inflight=own.inflight,
        )
        for index, own in enumerate(stages)
    ]


def _mirrored(ends: Floats) -> Floats:
    """What goes first where time runs the other way: what ended last. The last micro-batch is the first there."""
    return np.asarray(-ends[::-1, :, ::-1], dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Listed:
    """An order as it was made."""

    ranks: Ints
    """of every action, in the order in which they begin"""
    keys: Ints
    """likewise: its kind · stages + its stage"""
    ends: Floats
    """[kind, stage, micro-batch] when each ends"""

    @property
    def seconds(self) -> float:
        return float(self.ends.max())


def _schedule(stages: Sequence[LoopedStage], made: _Listed, count: int) -> Schedule:
    lanes = []
    for rank in range(int(made.ranks.max()) + 1):
        keys = made.keys[made.ranks == rank]
        microbatches = np.zeros(len(keys), np.int64)
        for key in np.unique(keys).tolist():
            microbatches[keys == key] = np.arange(count)
        lanes.append(Lane(rank, keys // len(stages), keys % len(stages), microbatches))
    return Schedule(
        name="interleaved",
        num_stages=len(stages),
        num_microbatches=count,
        placement=tuple((stage.rank,) for stage in stages),
        lanes=tuple(lanes),
    )


def _listed(
    stages: Sequence[LoopedStage],
    count: int,
    limit: float,
    room: Sequence[float] | None,
    prefers: LoopedChoice | Floats,
) -> _Listed:
    """What comes first has always run: as a choice has it, or what has the least of these times.

    A forward leaves room for one of every later stage of its rank, and there always is room for the only
    micro-batch of a stage and of those after it. So a stage waits for memory only where it or a later one holds
    some, which comes free once the stages behind it go on: no order waits for ever.
    """
    ranks = [stage.rank for stage in stages]
    warm = looped_warm_up([(rank,) for rank in ranks])
    require_sizes(len(warm), count)
    listed, keys, ends = list_actions(
        count,
        ranks,
        duration=np.array([[own.forward for own in stages], [own.backward for own in stages]]).ravel(),
        send=np.array([[own.send_forward for own in stages], [own.send_backward for own in stages]]).ravel(),
        inflight=np.array([own.inflight for own in stages]),
        most=np.array(
            [
                max(1.0, round(limit * (own + 1)) if limit < _NEVER else _NEVER, ranks.count(rank))
                for rank, own in enumerate(warm)
            ]
        ),
        room=np.full(len(warm), _NEVER) if room is None else np.array(room, dtype=np.float64),
        times=None if isinstance(prefers, LoopedChoice) else prefers.ravel(),
        backward_first=isinstance(prefers, LoopedChoice) and prefers.backward_first,
        deep_first=isinstance(prefers, LoopedChoice) and prefers.deep_first,
    )
    return _Listed(ranks=listed, keys=keys, ends=ends.reshape(2, len(stages), count))
