"""The plans that are worth running against each other, because no prediction says which is the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bapipe.costs.profile import ProfiledLayer
from bapipe.costs.recomputed_layers import recomputing
from bapipe.costs.segments import Chain, make_chain
from bapipe.planner.assemble_plan import make_plan
from bapipe.planner.candidate import Candidate, StageChoice, as_run
from bapipe.planner.evaluate import Evaluation, evaluate
from bapipe.planner.search import Exploration
from bapipe.planner.state import ideal_seconds
from bapipe.planner.ways import other_may_be_faster, other_way_of
from bapipe.records.plan import Plan
from bapipe.schedule.schedule_file import ScheduleFile

__all__ = ["race_candidates", "unraced_candidates", "unraced_evaluations"]


def race_candidates(found: Exploration, limit: int = 6) -> tuple[Plan, ...]:
    """At most so many plans, the chosen one first.

    Where errors are known, those within them of the best: each further one is the plan that most lowers the time
    to be expected of the fastest, and where none of the others may be faster, the chosen one is alone. Where no
    error is known, the fastest alternatives that fit. The best plan of the other way (compiled, or as captured)
    has a place among them if it may be faster.
    """
    other = other_way_of(found) if limit > 1 and other_may_be_faster(found) else None
    if other is None or other.best.candidate.engine != "bapipe":
        return tuple(_plan(found, own) for own in _runners(found, limit))
    return (*(_plan(found, own) for own in _runners(found, limit - 1)), make_plan(other))


def unraced_candidates(
    found: Exploration, again: Exploration, raced: Sequence[Plan], *, beat: float, limit: int
) -> tuple[Plan, ...]:
    """At most so many plans that have not run and may be faster than what has, now that more is known.

    `again` is the search with costs as the `raced` plans showed them, and `beat` the seconds of the fastest of
    these. The plans are made from the costs of `found`, as the raced ones were, so that one profile explains all.
    """
    return tuple(_plan(found, own) for own in unraced_evaluations(found, again, raced, beat=beat, limit=limit))


def unraced_evaluations(
    found: Exploration, again: Exploration, raced: Sequence[Plan], *, beat: float, limit: int
) -> list[Evaluation]:
    """What `unraced_candidates` makes plans of: those that are expected to lower the fastest time enough.

    Where no error is known, those that are predicted to.
    """
    known = [_shape(plan) for plan in raced]
    offered = again.considered if again.outlook is None else again.outlook.evaluations
    new = [own for own in offered if _may_run(own) and _candidate_shape(own.candidate, found) not in known]
    worth = found.tuning.race_again_gain
    if again.outlook is None:
        best = [own for own in new if own.time <= beat * (1 - worth)][:limit]
    else:
        seen = [own for own in offered if own not in new]
        best = again.outlook.improving(limit, beat=beat / found.global_batch, worth=worth, known=seen)
    candidates = [own.candidate for own in best]
    chains = [
        recomputing(make_chain(found.profile, own.chain.types, own.chain.microbatch), own.chain.recompute)
        for own in candidates
    ]
    return [
        evaluate(replace(own, chain=chain), found.hardware) for own, chain in zip(candidates, chains, strict=True)
    ]


def _may_run(evaluation: Evaluation) -> bool:
    """Whether it fits, and is made of whole layers, so that other costs have the same units."""
    candidate = evaluation.candidate
    whole = all(unit.whole for unit in candidate.chain.units)
    return evaluation.short is None and whole and candidate.engine == "bapipe"


def _runners(found: Exploration, limit: int) -> list[Evaluation]:
    if found.outlook is not None:
        return found.outlook.race(limit, worth=found.tuning.race_gain)
    runs = [own for own in found.considered if own.short is None and own.candidate.engine == "bapipe"]
    others = [own for own in runs if own is not found.best]
    return [found.best, *others][:limit]


def _shape(plan: Plan) -> tuple[object, ...]:
    """What tells two plans of one request apart."""
    runs = tuple((run.first, run.last) for stage in plan.stages for run in stage.recompute_layers)
    stages = tuple((stage.layers, stage.accelerators) for stage in plan.stages)
    return plan.microbatch_size, plan.schedule, stages, runs


def _candidate_shape(candidate: Candidate, found: Exploration) -> tuple[object, ...]:
    """The same of what is not a plan yet."""
    chain, members = candidate.chain, found.hardware.cluster.accelerators
    stages = tuple(
        (
            tuple(layer.name for layer in _layers(chain, stage)),
            tuple(members[index].name for index in stage.accelerators),
        )
        for stage in candidate.stages
    )
    return chain.microbatch, ScheduleFile.of(as_run(candidate), copies=candidate.copies), stages, chain.recompute


def _layers(chain: Chain, stage: StageChoice) -> tuple[ProfiledLayer, ...]:
    first, last = chain.units[stage.first].layer, chain.units[stage.last].layer
    return chain.profile.layers[first : last + 1]


def _plan(found: Exploration, evaluation: Evaluation) -> Plan:
    """The plan of another evaluation, with the others as its alternatives."""
    if evaluation is found.best:
        return make_plan(found)
    candidate = evaluation.candidate
    ideal = ideal_seconds(candidate.chain, found.hardware.cluster)
    return make_plan(replace(found, best=evaluation, steps=candidate.steps, ideal=ideal, left_out=None))
