"""Dealings that suit many cases of one shape: each case's micro-batches by the speed of its replicas."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.plan_cases import PlanCases
from bapipe.planner.planned_order import PlannedOrder
from bapipe.schedule.dealing import Dealing, deal_by_speed, deal_evenly, dealt_counts

__all__ = ["dealt_orders"]

Ints = NDArray[np.int64]
Deal = Callable[[tuple[float, ...]], Dealing]


def dealt_orders(cases: PlanCases, order: PlannedOrder, chosen: Ints) -> list[tuple[PlannedOrder, Ints]]:
    """The order with micro-batches dealt as suits the chosen cases, each with those that it suits.

    In the order of the cases. Stages deal by the speed of their own replicas; where all have as many, also as if
    the replicas were whole pipelines, as zero-bubble orders must; and the same numbers spread evenly. Left out is
    what deals in turn, and what leaves a replica without a micro-batch. Cost: O(cases · micro-batches) where all
    cases differ.
    """
    if not any(cases.unlike):
        return []
    work = cases.work_by_rank(recompute=order.recompute)[:, chosen].T.tolist()
    known: dict[tuple[float, ...], Dealing] = {}

    def deal(seconds: tuple[float, ...]) -> Dealing:
        if seconds not in known:
            known[seconds] = () if len(set(seconds)) == 1 else deal_by_speed(seconds, order.microbatches)
        return known[seconds]

    groups: dict[tuple[Dealing, ...], list[int]] = {}
    for case, seconds in zip(chosen.tolist(), work, strict=True):
        for dealing in _suiting(order, seconds, deal):
            sizes = zip(dealing, order.counts, strict=True)
            if any(dealing) and all(not own or len(set(own)) == count for own, count in sizes):
                groups.setdefault(dealing, []).append(case)
    return [(dealt, np.array(own, np.int64)) for dealing, own in groups.items() for dealt in order.dealt(dealing)]


def _suiting(order: PlannedOrder, seconds: list[float], deal: Deal) -> list[tuple[Dealing, ...]]:
    """The dealings of one case, by what a micro-batch takes on each rank."""
    counts, found, first = order.counts, list[tuple[Dealing, ...]](), 0
    own = []
    for count in counts:
        own.append(tuple(seconds[first : first + count]))
        first += count
    if not order.parted:
        found.append(tuple(deal(each) for each in own))
    if len(set(counts)) == 1 and (order.parted or len(counts) > 1):
        slowest = tuple(max(each) for each in zip(*own, strict=True))
        found.append((deal(slowest),) * len(counts))
    even = [] if len(counts) == 1 else [_spread(order, dealing) for dealing in found]
    return list(dict.fromkeys([*found, *even]))


def _spread(order: PlannedOrder, dealing: tuple[Dealing, ...]) -> tuple[Dealing, ...]:
    """The same numbers of micro-batches, each replica's as far apart as may be."""
    found: list[Dealing] = []
    for own, count in zip(dealing, order.counts, strict=True):
        shares = dealt_counts(own, count, order.microbatches)
        found.append(deal_evenly(shares) if own and min(shares) > 0 else own)
    return tuple(found)
