"""Pass: choose the plan that loses least where layers and links take other times than the profile says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bapipe.planner.evaluate import Candidate, Evaluation, evaluate
from bapipe.planner.incumbents import rank
from bapipe.planner.outlook import Outlook, least_regret
from bapipe.planner.pipelines import with_cuts
from bapipe.planner.scenarios import draw_scenarios
from bapipe.planner.state import SearchState

__all__ = ["weigh_errors"]

_SEED = 20


def weigh_errors(state: SearchState) -> None:
    """Add what the candidates near the best take in random scenarios, and the choice of least mean regret.

    Does nothing where no error is known. The candidates are the best of every family that fits, the others near
    the best that the search has kept, and those with one cut moved.
    """
    if not state.errors.any:
        return
    finalists = _finalists(state)
    actions = sum(evaluation.schedule.num_actions for evaluation in finalists)
    tuning = state.tuning
    count = min(tuning.scenarios, max(tuning.fewest_scenarios, tuning.scenario_actions // actions))
    scenarios = draw_scenarios(state.errors, len(state.profile.layers), count, seed=_SEED)
    times = scenarios.times(finalists, state.hardware)
    chosen = least_regret(finalists, times, tolerance=tuning.level_regret)
    order = [chosen, *(index for index in range(len(finalists)) if index != chosen)]
    state.outlook = Outlook(evaluations=tuple(finalists[index] for index in order), times=times[order])
    state.choice = finalists[chosen]


def _finalists(state: SearchState) -> list[Evaluation]:
    """What is timed in the scenarios, from the fastest on, as far as the budget of actions goes."""
    tuning = state.tuning
    best = state.best
    found = [best, *(own for own in state.incumbents.ranked() if own.short is None and own is not best)]
    seen = {_shape(own.candidate) for own in found}
    near = [best]
    for candidate in state.incumbents.near:
        if _shape(candidate) not in seen:
            seen.add(_shape(candidate))
            near.append(evaluate(candidate, state.hardware))
    near += [own for own in found[1:] if own.throughput * (1 + state.margin) >= best.throughput]
    near.sort(key=rank)
    budget = tuning.scenario_actions // tuning.scenarios
    for start in near[: tuning.moved_candidates]:
        for candidate in _moved(start.candidate):
            budget -= candidate.schedule.num_actions
            if budget > 0 and _shape(candidate) not in seen:
                seen.add(_shape(candidate))
                moved = evaluate(candidate, state.hardware)
                if moved.short is None:
                    near.append(moved)
    near.sort(key=rank)
    kept = {id(own): own for own in (best, *near[: tuning.scenario_candidates], *found)}
    finalists, most = [], tuning.scenario_actions // tuning.fewest_scenarios
    for own in sorted(kept.values(), key=lambda item: (item is not best, rank(item))):
        most -= own.schedule.num_actions
        if most > 0 or own is best:
            finalists.append(own)
    return finalists


def _shape(candidate: Candidate) -> tuple[object, ...]:
    """What tells two candidates apart."""
    schedule = candidate.schedule
    return candidate.chain.units, candidate.chain.microbatch, candidate.stages, schedule.name, schedule.caps


def _moved(candidate: Candidate) -> Iterator[Candidate]:
    """The same with one cut a unit earlier or later."""
    cuts = [stage.last for stage in candidate.stages]
    for index in range(len(cuts) - 1):
        for by in (-1, 1):
            trial = [*cuts[:index], cuts[index] + by, *cuts[index + 1 :]]
            if all(before < after for before, after in zip([-1, *trial[:-1]], trial, strict=True)):
                yield replace(candidate, stages=with_cuts(candidate.stages, trial), steps=())
