"""Why a partitioning problem has no plan, in words a user can act on."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from bapipe.planner.partition.exact.branch_and_bound import least_steady
from bapipe.planner.partition.exact.fill import choices
from bapipe.planner.partition.exact.problem import Problem, score
from bapipe.planner.partition.exact.problem_tables import Tables, reach
from bapipe.planner.partition.exact.windows import feasible

__all__ = ["explain"]


def explain(problem: Problem, tables: Tables) -> str:
    """Return why there is no plan. Cost: 20 times the memory tables and a search for the least bottleneck."""
    return _counts(problem) or _one_layer(problem) or _together(problem, tables)


def _counts(problem: Problem) -> str:
    """Stages, accelerators and cuts that do not agree."""
    n, wanted = problem.accelerators, problem.num_stages
    if wanted is not None and wanted > n:
        return f"{wanted} stages need {wanted} accelerators, got {n}; lower num_stages"
    if wanted is not None and problem.use_all and wanted != n:
        return f"use_all makes {n} stages of one accelerator, got num_stages {wanted}; leave one of them out"
    least = wanted or 1
    if problem.use_all:
        runs = problem.counts.tolist()
        if problem.order is not None:
            edges = np.flatnonzero(np.diff(problem.order)) + 1
            runs = np.diff([0, *edges, n]).tolist()
        least = sum(-(-run // problem.max_replicas) for run in runs)
    cuts = int(np.isfinite(problem.send_forward + problem.send_backward).sum())
    if least > problem.layers:
        return f"{least} stages need at least {least} layers, got {problem.layers}; lower the number of stages"
    if least > cuts + 1:
        return f"{least} stages need {least - 1} cuts, got {cuts} that are allowed; lower the number of stages"
    return ""


def _one_layer(problem: Problem) -> str:
    """A layer that fits nowhere even alone, with as few in-flight micro-batches as any stage has."""
    inflight = int(np.minimum(problem.inflight[1 : problem.accelerators + 1], problem.microbatches).min())
    there = np.flatnonzero(problem.counts)
    most = min(problem.max_replicas, int(problem.counts.max()))
    share = -(-inflight // most)
    whole = share * problem.saved_bytes
    again = share * problem.input_bytes + problem.saved_bytes
    kept = {"never": whole, "always": again, "allowed": np.minimum(whole, again)}[problem.recompute]
    need = problem.weights_bytes + kept
    room = problem.capacity - problem.overhead
    type_ = int(there[np.argmax(room[there])])
    layer = int(np.argmax(need))
    short = int(need[layer] - room[type_])
    if short <= 0:
        return ""
    return (
        f"layer {layer} alone needs {int(need[layer])} bytes, got {max(0, int(room[type_]))} on the roomiest "
        f"accelerator (type {type_}): {short} short; {_remedy(problem)}"
    )


def _together(problem: Problem, tables: Tables) -> str:
    """Memory that is short in every plan, or cuts that leave none."""

    def with_extra(extra: int) -> Tables:
        return replace(tables, memory=reach(problem, tables.keys, backend=tables.backend, extra=extra))

    def allowed(extra: int) -> bool:
        return feasible(with_extra(extra), steady=math.inf, update=math.inf)

    inflight = int(np.minimum(problem.inflight, problem.microbatches).max())
    high = int(
        problem.weights_bytes.sum()
        + (inflight + 1) * (problem.saved_bytes.sum() + problem.input_bytes.max())
        + problem.overhead.max()
    )
    if not allowed(high):
        return (
            f"no allowed cuts make a plan for {problem.accelerators} accelerators, got memory enough; allow more "
            "cuts or fewer stages"
        )
    low = 0
    # To a thousandth: a user needs the size of the gap, not its last byte.
    while high - low > max(1, high // 1000):
        middle = (low + high) // 2
        low, high = (low, middle) if allowed(middle) else (middle, high)
    outcome = least_steady(with_extra(high), max_states=10**8)
    if outcome.best is None:
        return f"every plan is short of memory, got at least {low} bytes too few somewhere; {_remedy(problem)}"
    roomy = replace(problem, capacity=problem.capacity + high)
    stages = score(roomy, choices(tables, outcome.best)).stages
    over = [stage.memory - int(problem.capacity[stage.type]) for stage in stages]
    worst = int(np.argmax(over))
    stage = stages[worst]
    return (
        f"every plan is short of memory; in the nearest one found stage {worst} (layers {stage.first_layer} to "
        f"{stage.last_layer} on type {stage.type}) needs {stage.memory} bytes, got "
        f"{int(problem.capacity[stage.type])}: {over[worst]} short; {_remedy(problem)}"
    )


def _remedy(problem: Problem) -> str:
    more = "" if problem.recompute != "never" else ", allow recomputation"
    return f"lower the micro-batch size{more} or add accelerators"
