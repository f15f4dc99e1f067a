"""Pass: brute force over the plan's cuts, where that is little work."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from bapipe.planner.evaluate import evaluate, unreplicated
from bapipe.planner.pipelines import with_cuts
from bapipe.planner.state import SearchState

__all__ = ["compare_every_cut"]


def compare_every_cut(state: SearchState) -> None:
    """Add the fastest of all cuts of the plan's depth, schedule and order of accelerators, each one simulated."""
    best, tuning = state.best, state.tuning
    chain, stages = best.candidate.chain, best.candidate.stages
    interleaved = best.candidate.schedule.num_ranks != len(stages)
    if interleaved or not unreplicated(stages):
        return
    if len(chain) > tuning.brute_layers or not 2 <= len(stages) <= tuning.brute_stages:
        return
    fastest = best
    for cuts in combinations(range(len(chain) - 1), len(stages) - 1):
        trial = with_cuts(stages, (*cuts, len(chain) - 1))
        if trial == stages:
            continue
        evaluation = evaluate(replace(best.candidate, stages=trial), state.hardware)
        if evaluation.short is None and evaluation.time < fastest.time:
            fastest = evaluation
    state.fastest_cut = fastest
