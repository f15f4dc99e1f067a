"""Pass: choose the plan that loses least where layers and links take other times than the profile says."""

from __future__ import annotations

import numpy as np

from bapipe.planner.candidate import Candidate
from bapipe.planner.evaluate import Evaluation, evaluate
from bapipe.planner.incumbents import rank
from bapipe.planner.nearby import moved_candidates, other_orders, quicker_in_scenarios, sampled_orders
from bapipe.planner.outlook import Outlook, least_regret
from bapipe.planner.passes.search_scenarios import best_in_scenarios
from bapipe.planner.scenarios import Scenarios, draw_scenarios, edge_scenarios
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
    state.outlook = Outlook(
        evaluations=tuple(finalists[index] for index in order), times=times[order], errors=state.errors
    )
    state.choice = finalists[chosen]


def _finalists(state: SearchState) -> list[Evaluation]:
    """What is timed in the scenarios, from the fastest on, as far as the budget of actions goes."""
    tuning, best = state.tuning, state.best
    found = [own for own in state.incumbents.ranked() if own.short is None]
    near = _Near(state, found)
    for candidate in state.incumbents.near:
        near.add(candidate)
    layers = len(state.profile.layers)
    thorough = state.thorough(layers)
    if thorough:
        drawn = draw_scenarios(state.errors, layers, tuning.searched_scenarios, seed=_SEED)
        edges = edge_scenarios(state.errors, layers, by=tuning.edge_errors)
        few = drawn.and_also(edges)
        at_edges = range(len(drawn), len(few))
        for candidate in best_in_scenarios(state, near.fastest(tuning.moved_candidates), few, looped=at_edges):
            near.add(candidate)
        for evaluation in other_orders(state, near.fastest(tuning.moved_candidates)):
            near.take(evaluation)
    for start in near.fastest(tuning.moved_candidates):
        for candidate in moved_candidates(start.candidate, state.cluster):
            near.add(candidate)
    chosen = near.fastest(tuning.scenario_candidates)
    if thorough:
        chosen = _often_fast(state, near.fastest(tuning.screened_candidates), few)
    kept = {id(own): own for own in (best, *chosen, *found)}
    if thorough:
        orders = _Near(state, [])
        for candidate in (*sampled_orders(state, chosen, few), *quicker_in_scenarios(state, chosen, few)):
            orders.add(candidate)
        kept |= {id(own): own for own in orders.fastest(tuning.scenario_orders)}
    finalists, most = [], tuning.scenario_actions // tuning.fewest_scenarios
    for own in sorted(kept.values(), key=lambda item: (item is not best, rank(item))):
        most -= own.schedule.num_actions
        if most > 0 or own is best:
            finalists.append(own)
    return finalists


def _often_fast(state: SearchState, evaluations: list[Evaluation], scenarios: Scenarios) -> list[Evaluation]:
    """Those that come nearest to the fastest of some scenario, as many as are timed in more of them."""
    times = scenarios.times(evaluations, state.hardware)
    relative = times / np.array([[own.samples] for own in evaluations])
    relative /= relative.min(axis=0)
    order = np.lexsort((relative.mean(axis=1), relative.min(axis=1)))
    return [evaluations[index] for index in order[: state.tuning.scenario_candidates].tolist()]


class _Near:
    """Evaluations that fit and that the errors do not tell from the best, each once."""

    def __init__(self, state: SearchState, found: list[Evaluation]) -> None:
        self._state = state
        self._budget = state.tuning.nearby_actions
        self._shares = state.request.zero_stage == "1"
        """whether only plans whose replicas share optimizer states are asked for"""
        self._known = {_shape(own.candidate): own for own in found}

    def add(self, candidate: Candidate) -> None:
        """Simulate a candidate unless it is known or too many actions were simulated already."""
        if _shape(candidate) in self._known or self._budget < candidate.schedule.num_actions:
            return
        self._budget -= candidate.schedule.num_actions
        self.take(evaluate(candidate, self._state.hardware))

    def take(self, evaluation: Evaluation) -> None:
        """Keep an evaluation that fits, unless the same stages under the same schedule are known to be as fast."""
        shape = _shape(evaluation.candidate)
        held = self._known.get(shape)
        allowed = evaluation.short is None and (evaluation.candidate.zero or not self._shares)
        if allowed and (held is None or rank(evaluation) < rank(held)):
            self._known[shape] = evaluation

    def fastest(self, count: int) -> list[Evaluation]:
        """So many at most, none slower than the errors explain."""
        ranked = sorted(self._known.values(), key=rank)
        if not ranked:
            return []
        enough = ranked[0].throughput / (1 + self._state.margin)
        return [own for own in ranked if own.throughput >= enough][:count]


def _shape(candidate: Candidate) -> tuple[object, ...]:
    """What tells two candidates apart."""
    schedule = candidate.schedule
    order = tuple(
        lane.kinds.tobytes() + lane.stages.tobytes() + lane.microbatches.tobytes() for lane in schedule.lanes
    )
    chain, how = candidate.chain, (candidate.zero, candidate.engine)
    return chain.units, chain.microbatch, chain.recompute, candidate.stages, schedule.name, order, how
