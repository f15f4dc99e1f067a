"""The plans that are worth running against each other, because no prediction says which is the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bapipe.costs.segments import make_chain
from bapipe.planner.assemble_plan import make_plan
from bapipe.planner.evaluate import Evaluation, evaluate
from bapipe.planner.search import Exploration
from bapipe.planner.state import ideal_seconds
from bapipe.records.plan import Plan

__all__ = ["race_candidates", "unraced_candidates"]


def race_candidates(found: Exploration, limit: int = 6) -> tuple[Plan, ...]:
    """At most so many plans, the chosen one first.

    Where errors are known, those within them of the best: each further one is the plan that most lowers the time
    to be expected of the fastest, and where none of the others may be faster, the chosen one is alone. Where no
    error is known, the fastest alternatives that fit.
    """
    return tuple(_plan(found, own) for own in _runners(found, limit))


def unraced_candidates(
    found: Exploration, again: Exploration, raced: Sequence[Plan], *, beat: float, limit: int
) -> tuple[Plan, ...]:
    """At most so many plans that have not run and should be faster than what has, now that more is known.

    `again` is the search with costs as the `raced` plans showed them, and `beat` the seconds of the fastest of
    these. The plans are made from the costs of `found`, as the raced ones were, so that one profile explains all.
    """
    enough = beat * (1 - found.tuning.race_again_gain)
    known = [_shape(plan) for plan in raced]
    plans = []
    for own in _runners(again, limit + len(raced)):
        candidate = own.candidate
        if own.time > enough or not all(unit.whole for unit in candidate.chain.units):
            continue
        chain = make_chain(found.profile, candidate.chain.types, candidate.chain.microbatch)
        plan = _plan(found, evaluate(replace(candidate, chain=chain), found.hardware))
        if _shape(plan) not in known:
            plans.append(plan)
    return tuple(plans[:limit])


def _runners(found: Exploration, limit: int) -> list[Evaluation]:
    if found.outlook is not None:
        return found.outlook.race(limit, worth=found.tuning.race_gain)
    others = [own for own in found.considered if own is not found.best and own.short is None]
    return [found.best, *others][:limit]


def _shape(plan: Plan) -> tuple[object, ...]:
    """What tells two plans of one request apart."""
    return plan.microbatch_size, plan.schedule, tuple((stage.layers, stage.accelerators) for stage in plan.stages)


def _plan(found: Exploration, evaluation: Evaluation) -> Plan:
    """The plan of another evaluation, with the others as its alternatives."""
    if evaluation is found.best:
        return make_plan(found)
    candidate = evaluation.candidate
    ideal = ideal_seconds(candidate.chain, found.hardware.cluster)
    return make_plan(replace(found, best=evaluation, steps=candidate.steps, ideal=ideal, left_out=None))
