"""The exact partitioner finds what trying every plan finds, on small random problems of every kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from brute_force_partition import plans, time_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bapipe.errors import InfeasibleError
from bapipe.planner.partition.exact.solve import UNLIMITED, Problem, Solution, solve
from bapipe.simulator.engine import numba_available
from example_counts import examples

LAYERS = {1: 10, 2: 10, 3: 10, 4: 9}
"""most layers by accelerators, which keeps brute force within some ten thousand plans"""


def problem_of(seed: int) -> Problem:
    """Return a small problem of any kind; whole numbers, for ties, or broken ones, for types hard to balance."""
    rng = np.random.default_rng(seed)
    unit = rng.choice([1.0, 0.1, 1 / 3, 0.0])

    def bytes_(low: int, high: int, *shape: int) -> Any:
        return rng.integers(low, high + 1, shape)

    def seconds(high: int, *shape: int) -> Any:
        return unit * rng.integers(0, high + 1, shape) if unit else rng.uniform(0, high, shape)

    def coin(chance: float = 0.5) -> bool:
        return bool(rng.random() < chance)

    n, types = int(rng.choice([1, 2, 3, 3, 4, 4])), int(rng.integers(1, 4))
    counts = rng.multinomial(n, np.full(types, 1 / types))
    layers = int(rng.integers(1 + LAYERS[n] // 2, LAYERS[n] + 1))
    num_stages = int(rng.integers(1, n + 1)) if coin(0.25) else None
    replicas = 1 if num_stages is not None else int(rng.integers(1, 4))
    microbatches = int(rng.integers(1, 9))
    lives = [np.arange(n + 1), np.full(n + 1, microbatches), 2 * np.arange(n + 1), bytes_(1, 6, n + 1)]
    forbidden = rng.random((2, layers - 1)) < rng.choice([0.0, 0.0, 0.1, 0.3])
    send = np.where(forbidden, np.inf, seconds(5, 2, layers - 1) * rng.choice([0.0, 0.3, 1.0]))
    return Problem(
        forward=seconds(6, types, layers),
        backward=seconds(6, types, layers),
        counts=counts,
        order=tuple(rng.permutation(np.repeat(np.arange(types), counts)).tolist()) if coin(0.4) else None,
        send_forward=send[0],
        send_backward=send[1],
        duplex_half=coin(),
        weights_bytes=bytes_(0, 6, layers),
        saved_bytes=bytes_(0, 6, layers),
        input_bytes=bytes_(0, 6, layers),
        gradient_bytes=bytes_(0, 3, layers),
        capacity=np.full(types, UNLIMITED) if coin() else bytes_(10, 12 * layers, types),
        overhead=bytes_(0, 3, types),
        microbatches=microbatches,
        inflight=lives[rng.integers(len(lives))],
        max_replicas=replicas,
        reduce_rate=seconds(3, replicas + 1),
        update=seconds(3, types, layers) * rng.choice([0.0, 0.3, 1.0]),
        recompute=str(rng.choice(["never", "allowed", "always"])),
        num_stages=num_stages,
        use_all=coin(0.25),
        count_communication=str(rng.choice(["overlapped", "exposed"])),
    )


def problems() -> st.SearchStrategy[Problem]:
    """Draw only a seed: left to choose sizes, hypothesis makes most problems too small to go wrong."""
    return st.integers(0, 2**32 - 1).map(problem_of)


def solved(problem: Problem, **options: Any) -> Solution | None:
    try:
        return solve(problem, **options)
    except InfeasibleError:
        return None


@settings(max_examples=examples(400), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems())
def test_no_plan_is_faster(problem: Problem) -> None:
    every = {plan: time_of(problem, plan) for plan in plans(problem)}
    solution = solved(problem, engine="python")
    if not every:
        assert solution is None
        return
    assert solution is not None
    assert solution.exact
    assert solution.objective == pytest.approx(min(map(sum, every.values())), rel=1e-9, abs=1e-9)
    chosen = tuple(
        (stage.first_layer, stage.last_layer + 1, stage.type, stage.replicas, stage.recompute)
        for stage in solution.stages
    )
    assert (solution.fill, solution.steady, solution.update) == pytest.approx(every[chosen], rel=1e-9, abs=1e-9)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems())
def test_no_plan_has_a_smaller_bottleneck(problem: Problem) -> None:
    every = [time_of(problem, plan) for plan in plans(problem)]
    solution = solved(problem, engine="python", minimise="bottleneck")
    if not every:
        assert solution is None
        return
    assert solution is not None
    assert solution.exact
    least = min(steady for _, steady, _ in every)
    assert solution.steady == pytest.approx(least, rel=1e-9, abs=1e-9)
    fill = min(fill for fill, steady, _ in every if steady <= least * (1 + 1e-9) + 1e-9)
    assert solution.fill == pytest.approx(fill, rel=1e-9, abs=1e-9)
    assert solution.lower_bound <= min(map(sum, every)) * (1 + 1e-9)


@pytest.mark.skipif(not numba_available(), reason="numba is not installed")
@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems())
def test_numba_gives_the_same_plan(problem: Problem) -> None:
    assert solved(problem, engine="numba") == solved(problem, engine="python")
