"""Cuts by what every stage really holds: those that lack least memory, and the best balanced ones that fit.

The exact partition adds up memory unit after unit. What a stage sends, receives and has as workspace depends on
where it begins and ends, which the tables here know.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bapipe.costs.recomputed_layers import run_inputs
from bapipe.planner.candidate import Hardware
from bapipe.planner.planned_order import PlannedOrder
from bapipe.planner.stage_tables import StageTables

__all__ = ["balanced_recomputing_cuts", "fitting_and_lightest_cuts"]

Floats = NDArray[np.float64]
Cuts = tuple[int, ...]


def fitting_and_lightest_cuts(
    tables: StageTables, hardware: Hardware, accelerators: Sequence[int], order: PlannedOrder
) -> tuple[Cuts | None, Cuts]:
    """Last units of stages of one accelerator each: such that each fits by its own figures and the longest is
    shortest, None where none fit; and such that the most that one of them lacks is least.

    Cost: O(stages · units²).
    """
    stages = _stages(tables, hardware, accelerators, order)
    lightest = _least_worst([need for need, _ in stages])
    costs = [np.where(need <= 0, work, np.inf) for need, work in stages]
    found = _least_worst(costs)
    return (found if np.isfinite(_worst(costs, found)) else None), lightest


def balanced_recomputing_cuts(
    tables: StageTables, hardware: Hardware, accelerators: Sequence[int], order: PlannedOrder
) -> tuple[float, Cuts] | None:
    """The same, with as much forward time repeated as memory asks for, such that the longest is shortest; and how
    long that is, its micro-batches together. None where none fit.

    What a stage repeats is estimated: layers are taken to be alike, each by itself. `accelerators` has the first
    of each stage's.
    """
    chain, costs = tables.chain, []
    kept = np.minimum(chain.saved_activations, run_inputs(chain))
    sums = np.concatenate([[0.0], np.cumsum(chain.saved_activations - kept)])
    spared = np.maximum(0.0, sums[None, 1:] - sums[:-1, None])
    rows = [chain.row(hardware.cluster.type_of(index).name) for index in accelerators]
    for stage, (need, work) in enumerate(_stages(tables, hardware, accelerators, order)):
        count = min(order.inflight[stage], order.microbatches)
        lacking = np.maximum(0.0, need)
        share = np.divide(lacking, count * spared, out=np.full_like(need, np.inf), where=spared > 0)
        share = np.where(lacking > 0, share, 0.0)
        forward = tables.seconds(frozenset({rows[stage]})).forward
        repeated = work + np.where(share <= 1, share, 0.0) * forward
        costs.append(np.where(share <= 1, max(order.taken(stage)) * repeated, np.inf))
    found = _least_worst(costs)
    worst = _worst(costs, found)
    rising = all(before < after for before, after in itertools.pairwise((-1, *found)))
    return (worst, found) if rising and np.isfinite(worst) else None


def _stages(
    tables: StageTables, hardware: Hardware, accelerators: Sequence[int], order: PlannedOrder
) -> list[tuple[Floats, Floats]]:
    """Of each stage, [first, last], bytes beyond its memory and seconds per micro-batch."""
    chain, held = tables.chain, tables.bytes(parted=order.parted)
    always = held.static(hardware.static_copies()) + held.casts + held.workspace
    always += 2 * (held.sent + held.returned + held.received + held.answered)
    known: dict[tuple[str, int, bool], tuple[Floats, Floats]] = {}
    found = []
    for stage, index in enumerate(accelerators):
        kind = hardware.cluster.type_of(index)
        count, again = min(order.inflight[stage], order.microbatches), stage in order.recompute
        key = kind.name, count, again
        if key not in known:
            seconds = tables.seconds(frozenset({chain.row(kind.name)}))
            work, need = seconds.forward + seconds.backward, always - kind.memory
            if again:
                need = need + held.saved_activations + count * held.kept
                work = work + seconds.forward
            else:
                need = need + count * held.saved_activations
            known[key] = need, work
        found.append(known[key])
    return found


def _worst(costs: Sequence[Floats], cuts: Cuts) -> float:
    """The largest of the stages' costs."""
    firsts = (0, *(cut + 1 for cut in cuts[:-1]))
    return max(float(cost[first, cut]) for cost, first, cut in zip(costs, firsts, cuts, strict=True))


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
