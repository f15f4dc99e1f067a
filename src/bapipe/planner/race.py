"""The plans that are worth running against each other, because no prediction says which is the fastest."""

from __future__ import annotations

from dataclasses import replace

from bapipe.planner.assemble_plan import make_plan
from bapipe.planner.evaluate import Evaluation
from bapipe.planner.search import Exploration
from bapipe.planner.state import ideal_seconds
from bapipe.records.plan import Plan

__all__ = ["race_candidates"]


def race_candidates(found: Exploration, limit: int = 6) -> tuple[Plan, ...]:
    """At most so many plans, the chosen one first.

    Where errors are known, those within them of the best: each further one is the plan that most lowers the time
    to be expected of the fastest, and where none of the others may be faster, the chosen one is alone. Where no
    error is known, the fastest alternatives that fit.
    """
    if found.outlook is None:
        others = [own for own in found.considered if own is not found.best and own.short is None]
        runners = [found.best, *others][:limit]
    else:
        runners = found.outlook.race(limit, worth=found.tuning.race_gain)
    return tuple(_plan(found, own) for own in runners)


def _plan(found: Exploration, evaluation: Evaluation) -> Plan:
    """The plan of another evaluation, with the others as its alternatives."""
    if evaluation is found.best:
        return make_plan(found)
    candidate = evaluation.candidate
    ideal = ideal_seconds(candidate.chain, found.hardware.cluster)
    return make_plan(replace(found, best=evaluation, steps=candidate.steps, ideal=ideal, brute_gap=None))
