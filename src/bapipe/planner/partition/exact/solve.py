"""The optimal contiguous partition of a network into pipeline stages.

`solve` finds, for up to three types of accelerators in any order or cabled as a chain, with replicated stages,
recomputation, communication and memory, the plan of least time T as exact_problem defines it, and proves it.

How: exact_kernels bounds what stages can reach, exact_programme finds the least fill Φ under thresholds on the
other two terms of T, exact_dual does so without counting accelerators of each type, and exact_search closes in on
the thresholds. All of it agrees with brute force in tests/properties/test_exact_partition.py.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import permutations
from typing import Literal

import numpy as np

from bapipe.errors import BaPipeError, InfeasibleError
from bapipe.planner.partition.exact.branch_and_bound import SearchOutcome, least_steady, least_time
from bapipe.planner.partition.exact.fill import choices
from bapipe.planner.partition.exact.infeasible import explain
from bapipe.planner.partition.exact.kernels import Backend
from bapipe.planner.partition.exact.problem import (
    UNLIMITED,
    Choice,
    Communication,
    PartitionStage,
    Problem,
    Recompute,
    Solution,
    score,
)
from bapipe.planner.partition.exact.problem_tables import Tables, prepare
from bapipe.simulator.engine import Engine, numba_available

__all__ = [
    "MAX_STATES",
    "NUMBA_FROM",
    "UNLIMITED",
    "Choice",
    "Communication",
    "Minimise",
    "PartitionStage",
    "Problem",
    "Recompute",
    "Solution",
    "score",
    "solve",
]

Minimise = Literal["time", "bottleneck"]

MAX_STATES = 2_000_000_000
"""states the search may visit by default: within a minute with numba"""
NUMBA_FROM = 200_000
"""layers · accelerators, times 100 for several types in any order, from which loading numba pays for itself"""


def solve(
    problem: Problem,
    *,
    minimise: Minimise = "time",
    engine: Engine = "auto",
    max_states: int = MAX_STATES,
    explained: bool = True,
) -> Solution:
    """Return the plan of least T, or of least steady term B and then least Φ, and whether that is proved.

    The result is optimal up to a relative rounding of 10⁻¹² and the same for every engine. Cost, measured with
    numba on one core: 1000 layers on 64 accelerators 0.02 s of one type and 0.2 to 1 s of three, 10 000 on 512 0.2
    to 1 s of one type and 6 to 10 s of two; replicas of three types cost up to ten times more. Memory: 8 bytes per
    state of one programme. Guard: beyond `max_states` visited states, 10⁸ states at once, or 2 · 10⁶ ways to count
    accelerators of each type, the rest of the search is left out; `exact` is then False if that may matter, and
    `lower_bound` tells how much at most.

    Raises InfeasibleError if no plan keeps the rules; `explained`, with the bytes short if memory is the cause,
    which takes as long as several searches.
    """
    if minimise not in ("time", "bottleneck"):
        raise BaPipeError(f"minimise must be time or bottleneck, got {minimise!r}; choose one")
    tables = prepare(problem, backend=Backend(compiled=_wants_numba(problem, engine)))
    outcome = (least_time if minimise == "time" else least_steady)(tables, max_states=max_states)
    if outcome.best is None and outcome.proved:
        raise InfeasibleError(explain(problem, tables) if explained else "no plan keeps the rules; loosen them")
    if outcome.best is None:
        return _in_blocks(problem, minimise=minimise, engine=engine, max_states=max_states)
    return _solution(problem, tables, outcome)


def _solution(problem: Problem, tables: Tables, outcome: SearchOutcome) -> Solution:
    assert outcome.best is not None
    plan = score(problem, choices(tables, outcome.best))
    lowest = plan.objective if outcome.lower_bound >= outcome.best.time else outcome.lower_bound
    return replace(plan, lower_bound=lowest, exact=outcome.proved)


def _wants_numba(problem: Problem, engine: Engine) -> bool:
    if engine != "auto":
        return engine == "numba"
    weight = 100 if problem.types > 1 and problem.order is None else 1
    large = weight * problem.layers * problem.accelerators >= NUMBA_FROM
    return (large or "numba" in sys.modules) and numba_available()


def _in_blocks(problem: Problem, *, minimise: Minimise, engine: Engine, max_states: int) -> Solution:
    """Return the best plan whose types follow one another in blocks, for when all else is too large."""
    if problem.order is not None or problem.types == 1:
        raise BaPipeError(
            f"{problem.layers} layers on {problem.accelerators} accelerators need more states than max_states, "
            f"got {max_states}; raise it, or group layers"
        )
    plans: list[Solution] = []
    for blocks in permutations(range(problem.types)):
        order = tuple(np.repeat(blocks, problem.counts[list(blocks)]).tolist())
        try:
            plans.append(
                solve(replace(problem, order=order), minimise=minimise, engine=engine, max_states=max_states)
            )
        except InfeasibleError:
            continue
    if not plans:
        raise BaPipeError(
            f"{problem.accelerators} accelerators of {problem.types} types are too many to try all orders, got no "
            "plan with types in blocks; give an order"
        )
    best = min(plans, key=lambda plan: plan.objective if minimise == "time" else plan.steady)
    return replace(best, exact=False, lower_bound=0.0)
