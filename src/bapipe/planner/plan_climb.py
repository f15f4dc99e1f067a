"""From a plan to the fastest near it, and on from there: for problems with too many plans to list them all."""

from __future__ import annotations

import numpy as np

from bapipe.costs.segments import Chain
from bapipe.planner.candidate import StageChoice, unreplicated
from bapipe.planner.cut_search import CutSearch
from bapipe.planner.evaluate import Evaluation
from bapipe.planner.local_moves import moved_cuts, other_shapes, swapped_orders
from bapipe.planner.order_space import OrderSpace, order_spaces
from bapipe.planner.plan_cases import PlanCases
from bapipe.planner.planned_order import PlannedOrder
from bapipe.planner.state import SearchState

__all__ = ["climb"]

Cuts = tuple[int, ...]
Order = tuple[int, ...]


def climb(state: SearchState, search: CutSearch, start: Evaluation) -> None:
    """Go from a plan to the fastest near it, and on from there, until none near is faster."""
    tuning, chain = state.tuning, start.candidate.chain
    space = next((own for own in order_spaces(state.request) if own.name == _space_name(state, start)), None)
    if space is None:
        return
    current, order = start, _order_of(space, start)
    while not search.spent:
        stages, counts = current.candidate.stages, order.counts
        below = (1 - tuning.search_gain) / current.throughput
        cuts = tuple(stage.last for stage in stages)
        taken = tuple(index for stage in stages for index in stage.accelerators)
        near = _near(state, search, chain, counts, moved_cuts(cuts, most=tuning.cases_together), taken)
        found = search.try_order(space, near, order, below=below)
        if found is None:
            few = _near(state, search, chain, counts, moved_cuts(cuts, most=4 * len(cuts)), taken)
            for trial in space.near(order, counts, order.microbatches):
                found = search.try_order(space, few, trial, below=below)
                if found is not None:
                    order = trial
                    break
        if found is None and state.request.stages is None:
            made = _reshaped(state, search, space, chain, stages, order, below)
            if made is not None:
                found, order = made
        if found is None:
            return
        current = found


def _near(
    state: SearchState, search: CutSearch, chain: Chain, counts: tuple[int, ...], cuts: list[Cuts], taken: Order
) -> PlanCases:
    """These cuts on these accelerators, and the first of them on others."""
    orders = swapped_orders(state.cluster, taken, most=len(taken) ** 2 + 1)
    pairs = [(own, taken) for own in cuts] + [
        (own, order) for order in orders[1:] for own in cuts[: 2 * len(counts)]
    ]
    both = [np.array(values, np.int64) for values in zip(*pairs, strict=True)]
    return search.cases(chain, counts, *both)


def _reshaped(
    state: SearchState,
    search: CutSearch,
    space: OrderSpace,
    chain: Chain,
    stages: tuple[StageChoice, ...],
    order: PlannedOrder,
    below: float,
) -> tuple[Evaluation, PlannedOrder] | None:
    """The first faster plan with other replicas, or a stage more or less."""
    shapes = other_shapes(chain, state.cluster, stages, replicas=space.replicas)
    for counts, cuts, taken in shapes:
        if search.spent:
            return None
        if max(counts) > order.microbatches or (len(counts) == 1 and counts[0] > 1):
            continue
        if not space.allows(counts):
            continue
        cases = _near(state, search, chain, counts, moved_cuts(cuts, most=state.tuning.cases_together), taken)
        for trial in space.usual(counts, order.microbatches):
            found = search.try_order(space, cases, trial, below=below)
            if found is not None:
                return found, trial
    return None


def _space_name(state: SearchState, start: Evaluation) -> str | None:
    """The schedule under which plans near this one are looked for; None where there are none."""
    candidate = start.candidate
    name, stages = candidate.schedule.name, candidate.stages
    if candidate.schedule.num_ranks != sum(len(stage.accelerators) for stage in stages) or len(stages) < 2:
        return None
    whole = all(unit.whole for unit in candidate.chain.units)
    if not whole or any(stage.recompute for stage in stages):
        return None
    if state.request.schedule is not None:
        return name
    return "zb" if name.startswith("zb") and unreplicated(stages) else None if name.startswith("zb") else "1f1b"


def _order_of(space: OrderSpace, start: Evaluation) -> PlannedOrder:
    """The start's own in-flight counts where they are known; else the first of the usual ones."""
    candidate = start.candidate
    counts = tuple(len(stage.accelerators) for stage in candidate.stages)
    microbatches, caps = candidate.schedule.num_microbatches, candidate.schedule.caps
    if space.chooses and caps is not None and not space.name.startswith("zb"):
        held = tuple(min(cap, -(-microbatches // count) * count) for cap, count in zip(caps, counts, strict=True))
        return next(space.of(counts, microbatches, held))
    return list(space.usual(counts, microbatches))[-1]
