"""Cuts by what every stage really holds: those that lack least memory, and the best balanced ones that fit.

The exact partition adds up memory unit after unit. What a stage sends, receives and has as workspace depends on
where it begins and ends, which the tables here know.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.evaluate import Hardware
from bapipe.planner.planned_order import PlannedOrder
from bapipe.planner.stage_tables import StageTables

__all__ = ["balanced_fitting_cuts", "lightest_cuts"]

Floats = NDArray[np.float64]
Cuts = tuple[int, ...]


def lightest_cuts(
    tables: StageTables, hardware: Hardware, accelerators: Sequence[int], order: PlannedOrder
) -> Cuts:
    """Last units of stages of one accelerator each, such that the most that one of them lacks is least.

    Cost: O(stages · units²).
    """
    return _least_worst([need for need, _ in _stages(tables, hardware, accelerators, order)])


def balanced_fitting_cuts(
    tables: StageTables, hardware: Hardware, accelerators: Sequence[int], order: PlannedOrder
) -> Cuts | None:
    """The same, such that each fits by its own figures and the longest is shortest; None where none fit."""
    costs = [np.where(need <= 0, work, np.inf) for need, work in _stages(tables, hardware, accelerators, order)]
    found = _least_worst(costs)
    firsts = (0, *(cut + 1 for cut in found[:-1]))
    fits = all(np.isfinite(cost[first, cut]) for cost, first, cut in zip(costs, firsts, found, strict=True))
    return found if fits else None


def _stages(
    tables: StageTables, hardware: Hardware, accelerators: Sequence[int], order: PlannedOrder
) -> list[tuple[Floats, Floats]]:
    """Of each stage, [first, last], bytes beyond its memory and seconds per micro-batch."""
    chain, held = tables.chain, tables.bytes(parted=order.parted)
    found = []
    for stage, index in enumerate(accelerators):
        kind = hardware.cluster.type_of(index)
        count, again = min(order.inflight[stage], order.microbatches), stage in order.recompute
        each = held.kept if again else held.saved_activations
        messages = 2 * (held.sent + held.returned + held.received + held.answered)
        need = held.static(hardware.static_copies()) + held.casts + count * each + messages + held.workspace
        seconds = tables.seconds(frozenset({chain.row(kind.name)}))
        work = seconds.forward + seconds.backward
        if again:
            need, work = need + held.saved_activations, work + seconds.forward
        found.append((need - kind.memory, work))
    return found


def _least_worst(costs: Sequence[Floats]) -> Cuts:
    """Last units such that the largest of the stages' costs, [first, last] each, is least."""
    units = len(costs[0])
    empty = np.arange(units)[:, None] > np.arange(units)[None, :]
    best, came = costs[0][0].copy(), []
    for cost in costs[1:]:
        # [first, last]: the stages before end just before `first`.
        before = np.concatenate([[np.inf], best[:-1]])[:, None]
        worst = np.where(empty, np.inf, np.maximum(before, cost))
        came.append(worst.argmin(axis=0))
        best = worst.min(axis=0)
    cuts = [units - 1]
    for firsts in reversed(came):
        cuts.append(int(firsts[cuts[-1]]) - 1)
    return tuple(reversed(cuts))
