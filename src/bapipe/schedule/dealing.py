"""Which replica of a stage takes which micro-batch: the one place that says so.

A dealing is a sequence of replicas, by their place among the stage's, that repeats itself: micro-batch m goes to
entry m, modulo its length. The empty one deals in turn, micro-batch m to replica m mod r, as suits alike replicas:

    ()            r = 2       0 1 0 1 0 1 …
    (0, 0, 1)     twice as many for the first       0 0 1 0 0 1 …

Of K micro-batches in a row a replica takes a share, and holds no more than that where a stage has K in flight.
"""

from __future__ import annotations

import bisect
import functools
import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bapipe.errors import ScheduleError

__all__ = [
    "Dealing",
    "Ints",
    "copied_dealing",
    "deal_by_speed",
    "deal_evenly",
    "dealt_counts",
    "least_shared",
    "most_in_a_row",
    "own_microbatches",
    "replica_taking",
    "require_dealing",
    "round_length",
    "shortest_dealing",
    "takers",
    "widest_span",
]

Ints = NDArray[np.int64]
Dealing = tuple[int, ...]
"""replicas, by their place among the stage's, that take one micro-batch after another, over and over; empty: in
turn"""


def replica_taking(dealing: Dealing, replicas: int, microbatch: int) -> int:
    """The replica that takes this micro-batch, by its place."""
    return dealing[microbatch % len(dealing)] if dealing else microbatch % replicas


def round_length(dealing: Dealing, replicas: int) -> int:
    """Micro-batches after which the dealing begins anew."""
    return len(dealing) or replicas


def takers(dealing: Dealing, replicas: int, microbatches: int) -> Ints:
    """The replica of each of so many micro-batches."""
    numbers = np.arange(microbatches, dtype=np.int64)
    return np.array(dealing, np.int64)[numbers % len(dealing)] if dealing else numbers % replicas


def own_microbatches(dealing: Dealing, replicas: int, replica: int, microbatches: int) -> Ints:
    """The micro-batches that one replica takes, in order."""
    if not dealing:
        return np.arange(replica, microbatches, replicas, dtype=np.int64)
    return np.flatnonzero(takers(dealing, replicas, microbatches) == replica)


def dealt_counts(dealing: Dealing, replicas: int, microbatches: int) -> tuple[int, ...]:
    """How many micro-batches each replica takes."""
    if not dealing:
        return tuple(len(range(replica, microbatches, replicas)) for replica in range(replicas))
    return tuple(np.bincount(takers(dealing, replicas, microbatches), minlength=replicas).tolist())


def most_in_a_row(dealing: Dealing, replicas: int, replica: int, length: int) -> int:
    """How many of `length` micro-batches in a row a replica takes at most: its share of so many in flight."""
    if not dealing:
        return -(-length // replicas)
    rounds, rest = divmod(length, len(dealing))
    own = np.array(dealing) == replica
    sums = np.concatenate([[0], np.cumsum(np.concatenate([own, own]))])
    windows = sums[rest : rest + len(dealing)] - sums[: len(dealing)]
    return int(rounds * own.sum() + windows.max())


def least_shared(dealing: Dealing, replicas: int, held: int) -> int:
    """The least number in flight of which the share of every replica is so many."""
    if not dealing:
        return held * replicas
    least = held
    for replica in range(replicas):
        if most_in_a_row(dealing, replicas, replica, least) < held:
            # The more in a row, the more are its own: all of its next `held` at the latest.
            own = functools.partial(most_in_a_row, dealing, replicas, replica)
            least += bisect.bisect_left(range(least, held * len(dealing)), held, key=own)
    return least


def widest_span(dealing: Dealing, replicas: int, replica: int, count: int) -> int:
    """From a micro-batch of the replica to the one that it takes as the `count`-th with it, at most."""
    if not dealing:
        return (count - 1) * replicas
    own = np.flatnonzero(np.array(dealing) == replica)
    rounds, rest = divmod(count - 1, len(own))
    later = np.concatenate([own, own + len(dealing)])[rest : rest + len(own)]
    return int(rounds * len(dealing) + (later - own).max())


def copied_dealing(dealing: Dealing, copies: int) -> Dealing:
    """The dealing of so many copies of a stage that deals so, where micro-batches go to the copies in turn.

    Replica i of copy k has place i · copies + k among all.
    """
    return tuple(replica * copies + copy for replica in dealing for copy in range(copies))


def deal_by_speed(seconds: Sequence[float], microbatches: int, *, fill: Sequence[float] | None = None) -> Dealing:
    """Each micro-batch to the replica that would end it first, given what one takes on each.

    No other dealing ends the last one sooner. In turn where that gives every replica as many. Where replicas are
    whole pipelines, `fill` has the seconds that each takes besides. Cost: O(M log r).
    """
    first = [0.0] * len(seconds) if fill is None else fill
    ends = [(more + own, replica) for replica, (own, more) in enumerate(zip(seconds, first, strict=True))]
    heapq.heapify(ends)
    dealt = []
    for _ in range(microbatches):
        end, replica = ends[0]
        dealt.append(replica)
        heapq.heapreplace(ends, (end + seconds[replica], replica))
    return shortest_dealing(tuple(dealt), len(seconds))


def deal_evenly(shares: Sequence[int]) -> Dealing:
    """So many micro-batches to each replica, each replica's as far apart as may be."""
    return deal_by_speed([1 / share for share in shares], sum(shares))


def shortest_dealing(sequence: Dealing, replicas: int) -> Dealing:
    """The dealing of these micro-batches, as short as it may be; empty where every replica has its even share."""
    if dealt_counts(sequence, replicas, len(sequence)) == dealt_counts((), replicas, len(sequence)):
        return ()
    # Where the sequence shifted by its own period meets itself, as in matching strings.
    borders, length = [0] * len(sequence), 0
    for place in range(1, len(sequence)):
        while length and sequence[place] != sequence[length]:
            length = borders[length - 1]
        length += sequence[place] == sequence[length]
        borders[place] = length
    return sequence[: len(sequence) - borders[-1]]


def require_dealing(dealing: Dealing, replicas: int, microbatches: int, *, stage: int) -> None:
    """Refuse one that names a replica that is not there, or leaves one without a micro-batch."""
    if not dealing:
        return
    if min(dealing) < 0 or max(dealing) >= replicas or len(dealing) > microbatches:
        raise ScheduleError(
            f"the dealing of stage {stage} names replicas 0 to {replicas - 1} for at most {microbatches} "
            f"micro-batches, got {len(dealing)} from {min(dealing)} to {max(dealing)}; correct it"
        )
    idle = set(range(replicas)) - set(dealing)
    if idle:
        raise ScheduleError(
            f"the dealing of stage {stage} gives replica {min(idle)} no micro-batch; give it one, or leave it out"
        )
