"""What is ready runs, by a preference: the loop that lists orders of pipelines whose ranks have several stages.

One source, compiled by numba where that is loaded already, or run as plain Python on lists. Forwards have kind 0,
backwards kind 1. What there is of each kind, stage and micro-batch lies at index (kind · stages + stage) · count +
micro-batch.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["list_actions"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_NEVER = float("inf")


def _kernel(
    count: int,
    rank_of: Any,
    own_start: Any,
    own: Any,
    duration: Any,
    send: Any,
    inflight: Any,
    most: Any,
    room: Any,
    timed: bool,
    backward_first: bool,
    deep_first: bool,
    times: Any,
    ready: Any,
    done: Any,
    free: Any,
    option: Any,
    choice: Any,
    stale: Any,
    listed: Any,
    ends: Any,
) -> bool:
    """Fill in `listed`, for every rank kind · stages + stage of its actions one after the other, and `ends`.

    False where every rank waits for another. `own` has the stages of rank r from own_start[r] on; `ready`, `done`,
    `free`, `option`, `choice` and `stale` are where it works.
    """
    stages, ranks = len(rank_of), len(own_start) - 1
    used = 0
    for rank in range(ranks):
        stale[rank] = rank
    stale_ranks = ranks
    for _ in range(2 * stages * count):
        for place in range(stale_ranks):
            # When this rank would begin what next: by start, preference twice, kind and stage.
            rank = stale[place]
            begin, end = own_start[rank], own_start[rank + 1]
            best_start, best_first, best_value, best = _NEVER, 0, 0.0, -1
            for at in range(begin, end):
                for kind in range(2):
                    key = kind * stages + own[at]
                    number = done[key]
                    if number >= (count if kind == 0 else done[own[at]]):
                        continue
                    there = ready[key * count + number]
                    if there == _NEVER:
                        continue
                    if kind == 0:
                        # A forward leaves room for one of every later stage, and the first of all always has it.
                        held, now, more, later = 0, 0.0, 0.0, False
                        for other in range(begin, end):
                            waits = done[own[other]] - done[stages + own[other]]
                            held += waits
                            now += waits * inflight[own[other]]
                            if other >= at:
                                more += inflight[own[other]]
                                later = later or waits > 0
                        if later and (held + end - at > most[rank] or now + more > room[rank]):
                            continue
                    start = max(free[rank], there)
                    if timed:
                        first, value = 0, times[key * count + number]
                    else:
                        first = 1 if (kind == 0) == backward_first else 0
                        value = -float(own[at]) if deep_first else there
                    if start < best_start or (
                        start == best_start
                        and (
                            first < best_first
                            or (
                                first == best_first
                                and (value < best_value or (value == best_value and key < best))
                            )
                        )
                    ):
                        best_start, best_first, best_value, best = start, first, value, key
            option[3 * rank], option[3 * rank + 1], option[3 * rank + 2] = best_start, best_first, best_value
            choice[rank] = best
        rank = 0
        for other in range(1, ranks):
            for figure in range(3):
                one, two = option[3 * other + figure], option[3 * rank + figure]
                if one != two:
                    break
            if one < two or (one == two and choice[other] < choice[rank]):
                rank = other
        if option[3 * rank] == _NEVER:
            return False
        key = choice[rank]
        kind, stage = key // stages, key % stages
        number = done[key]
        done[key] = number + 1
        end_time = option[3 * rank] + duration[key]
        free[rank] = end_time
        ends[key * count + number] = end_time
        listed[used], listed[used + 1] = rank, key
        used += 2
        stale[0] = rank
        stale_ranks = 1
        if kind == 0 and stage == stages - 1:
            ready[(stages + stage) * count + number] = end_time
        elif kind == 0 or stage > 0:
            target = key + 1 if kind == 0 else key - 1
            peer = rank_of[target % stages]
            ready[target * count + number] = end_time + (send[key] if peer != rank else 0.0)
            if peer != rank:
                stale[1] = peer
                stale_ranks = 2
    return True


@functools.cache
def _compiled() -> Callable[..., bool]:
    compiled: Callable[..., bool] = importlib.import_module("numba").njit(cache=True)(_kernel)
    return compiled


def list_actions(
    count: int,
    ranks: list[int],
    *,
    duration: Floats,
    send: Floats,
    inflight: Floats,
    most: Floats,
    room: Floats,
    times: Floats | None = None,
    backward_first: bool = False,
    deep_first: bool = False,
) -> tuple[Ints, Ints, Floats]:
    """The rank and kind · stages + stage of every action, in the order in which they begin, and when each ends.

    `ranks` has the rank of each stage; `duration` and `send` are of kind · stages + stage, `most` and `room` the
    activations and bytes that each rank may hold. What begins first is listed first; of actions that begin at the
    same time the one with the least of `times`, or by the two preferences and then by kind and stage.
    """
    stages = len(ranks)
    own = np.argsort(ranks, kind="stable")
    ready = np.full(2 * stages * count, _NEVER)
    ready[:count] = 0.0
    listed, ends = np.zeros(4 * stages * count, np.int64), np.zeros(2 * stages * count)
    rank_count = max(ranks) + 1
    arguments: list[Any] = [
        count,
        np.array(ranks),
        np.concatenate([[0], np.cumsum(np.bincount(ranks))]),
        own,
        duration,
        send,
        inflight,
        most,
        room,
        times is not None,
        backward_first,
        deep_first,
        np.zeros(0) if times is None else times,
        ready,
        np.zeros(2 * stages, np.int64),
        np.zeros(rank_count),
        np.zeros(3 * rank_count),
        np.zeros(rank_count, np.int64),
        np.zeros(max(2, rank_count), np.int64),
        listed,
        ends,
    ]
    if "numba" in sys.modules:
        done = _compiled()(*arguments)
    else:
        lists = [item.tolist() if isinstance(item, np.ndarray) else item for item in arguments]
        done = _kernel(*lists)
        listed[:], ends[:] = lists[-2], lists[-1]
    assert done, "every rank waits for another"
    return listed[::2], listed[1::2], ends
