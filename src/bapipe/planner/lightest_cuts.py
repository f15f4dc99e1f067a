"""Cuts by what every stage really holds: those that lack least memory, and the best balanced ones that fit.

The exact partition adds up memory unit after unit. What a stage sends, receives and has as workspace depends on
where it begins and ends, which the tables here know.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bapipe.costs.recomputed_layers import run_inputs
from bapipe.planner.candidate import Hardware
from bapipe.planner.planned_order import PlannedOrder
from bapipe.planner.stage_tables import StageTables

__all__ = ["fitting_and_lightest_cuts", "recomputing_cuts"]

Floats = NDArray[np.float64]
Cuts = tuple[int, ...]
_NOTHING = 1e-200
"""bytes: so few that a stage which lacks any would spare many times as much"""


def fitting_and_lightest_cuts(
    tables: StageTables, hardware: Hardware, accelerators: Sequence[int], order: PlannedOrder
) -> tuple[Cuts | None, Cuts]:
    """Last units of stages of one accelerator each: such that each fits by its own figures and the longest is
    shortest, None where none fit; and such that the most that one of them lacks is least.

    Cost: O(stages · units²).
    """
    stages = _stages(tables, hardware, accelerators, order)
    lightest = _least_worst([own.need for own in stages])
    fitting = {id(own): np.where(own.need <= 0, own.work, np.inf) for own in stages}
    costs = [fitting[id(own)] for own in stages]
    found = _least_worst(costs)
    return (found if np.isfinite(_worst(costs, found)) else None), lightest


def recomputing_cuts(
    tables: StageTables,
    hardware: Hardware,
    accelerators: Sequence[int],
    order: PlannedOrder,
    others: Sequence[Cuts] = (),
) -> list[tuple[float, Cuts]]:
    """Cuts whose stages repeat as much forward time as memory asks for: those of the shortest longest stage, then
    the `others`; each with how long that stage takes, its micro-batches together. Infinite where they do not fit.

    What a stage repeats is estimated: layers are taken to be alike, each by itself. `accelerators` has the first
    of each stage's.
    """
    chain, costs = tables.chain, []
    kept = np.minimum(chain.saved_activations, run_inputs(chain))
    sums = np.concatenate([[0.0], np.cumsum(chain.saved_activations - kept)])
    spared = sums[1:, None] - sums[None, :-1]
    spared[spared <= 0] = _NOTHING
    for stage, own in enumerate(_stages(tables, hardware, accelerators, order)):
        count = min(order.inflight[stage], order.microbatches)
        share = np.maximum(0.0, own.need) / (count * spared)
        with np.errstate(invalid="ignore"):  # what does not fit at all, and repeats nothing
            cost = max(order.taken(stage)) * (own.work + share * own.forward)
        np.copyto(cost, np.inf, where=share > 1)
        costs.append(cost)
    found = dict.fromkeys((_least_worst(costs), *others))
    return [(_worst(costs, cuts), cuts) for cuts in found if _rising(cuts)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stage:
    """What a stage would lack and take with any run of units: [last, first], as numpy is quickest along the last
    axis."""

    need: Floats
    """bytes beyond its memory; infinite where the run is empty"""
    work: Floats
    """seconds per micro-batch"""
    forward: Floats


def _stages(
    tables: StageTables, hardware: Hardware, accelerators: Sequence[int], order: PlannedOrder
) -> list[_Stage]:
    """Of each stage, what every run of units needs and takes; one object for stages that are alike."""
    always, saved, kept = _bytes(tables, hardware.static_copies(), parted=order.parted)
    known: dict[tuple[str, int, bool], _Stage] = {}
    found = []
    for stage, index in enumerate(accelerators):
        kind = hardware.cluster.type_of(index)
        count, again = min(order.inflight[stage], order.microbatches), stage in order.recompute
        key = kind.name, count, again
        if key not in known:
            need, (work, forward) = always - kind.memory, _seconds(tables, tables.chain.row(kind.name))
            if again:
                known[key] = _Stage(need=need + saved + count * kept, work=work + forward, forward=forward)
            else:
                known[key] = _Stage(need=need + count * saved, work=work, forward=forward)
        found.append(known[key])
    return found


@functools.lru_cache(maxsize=2)
def _bytes(tables: StageTables, copies: float, *, parted: bool) -> tuple[Floats, Floats, Floats]:
    """[last, first] what a stage holds apart from its activations, infinite where the run is empty; and of each
    micro-batch its activations, and its input."""
    held, units = tables.bytes(parted=parted), np.arange(len(tables.chain))
    always = held.static(copies) + held.casts + held.workspace
    always += 2 * (held.sent + held.returned + held.received + held.answered)
    empty = units[:, None] > units[None, :]
    return np.where(empty, np.inf, always).T.copy(), held.saved_activations.T.copy(), held.kept.T.copy()


@functools.lru_cache(maxsize=2)
def _seconds(tables: StageTables, row: int) -> tuple[Floats, Floats]:
    """[last, first] seconds of a micro-batch, and of its forward, on one type of accelerator."""
    own = tables.seconds(frozenset({row}))
    return (own.forward + own.backward).T.copy(), own.forward.T.copy()


def _worst(costs: Sequence[Floats], cuts: Cuts) -> float:
    """The largest of the stages' costs."""
    firsts = (0, *(cut + 1 for cut in cuts[:-1]))
    return max(float(cost[last, first]) for cost, first, last in zip(costs, firsts, cuts, strict=True))


def _rising(cuts: Cuts) -> bool:
    """Whether every stage has a unit."""
    return all(before < after for before, after in itertools.pairwise((-1, *cuts)))


def _least_worst(costs: Sequence[Floats]) -> Cuts:
    """Last units such that the largest of the stages' costs, [last, first] each, is least."""
    units = len(costs[0])
    best, came = costs[0][:, 0].copy(), []
    for cost in costs[1:]:
        # The stages before end just before `first`.
        worst = np.maximum(np.concatenate([[np.inf], best[:-1]]), cost)
        came.append(worst.argmin(axis=1))
        best = worst[np.arange(units), came[-1]]
    cuts = [units - 1]
    for firsts in reversed(came):
        cuts.append(int(firsts[cuts[-1]]) - 1)
    return tuple(reversed(cuts))
