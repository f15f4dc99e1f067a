"""The planner finds what brute force finds on small problems of every kind, and more never makes it slower.

A sample of benchmarks/planner_oracle, by fixed seeds.
"""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest

from bapipe.costs.planned_optimizer import planned_optimizer
from bapipe.costs.segments import make_chain
from bapipe.errors import InfeasibleError
from bapipe.planner import explore
from bapipe.planner.candidate import Hardware
from bapipe.planner.dealt_cases import dealt_orders
from bapipe.planner.evaluate import evaluate
from bapipe.planner.order_space import DATA_PARALLEL, order_spaces
from bapipe.planner.placements import accelerator_orders, replica_counts
from bapipe.planner.plan_cases import PlanCases
from bapipe.planner.planned_order import PlannedOrder
from bapipe.planner.stage_tables import StageTables
from paths import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks" / "planner_oracle"))

from easier_problems import check_of
from every_plan import fastest_plan
from random_problems import Problem, problem_of

EQUAL = 1e-3
"""share of the throughput by which two plans may differ and count as equally fast"""


def rate(problem: Problem) -> float:
    """Samples/s of the plan, 0 where it is refused."""
    try:
        return explore(problem.profile, problem.cluster, problem.request).best.throughput
    except InfeasibleError:
        return 0.0


@pytest.mark.parametrize("seed", range(2000, 2014))
def test_no_plan_is_faster(seed: int) -> None:
    problem = problem_of(seed)
    assert rate(problem) >= fastest_plan(problem).rate * (1 - EQUAL)


@pytest.mark.parametrize("seed", [*range(2000, 2010), 70, 387, 426, 994, 1206, 1489])
def test_more_is_never_slower(seed: int) -> None:
    check = check_of(seed)
    assert rate(check.more) >= rate(check.less) * (1 - EQUAL)


@pytest.mark.parametrize("seed", [*range(3000, 3006), 3017, 3023])
def test_cases_are_timed_as_the_simulator_does_and_bounds_hold(seed: int) -> None:
    problem, rng = problem_of(seed), np.random.default_rng(seed)
    types = tuple(dict.fromkeys(item.type for item in problem.cluster.accelerators))
    hardware = Hardware(cluster=problem.cluster, optimizer=planned_optimizer(problem.profile, types, None))
    chain, microbatches = make_chain(problem.profile, types, 1), problem.request.global_batch
    assert microbatches is not None
    tables, units = StageTables(chain), len(chain)
    for counts in replica_counts(len(problem.cluster), stages=None, most_stages=units, replicas=True):
        orders = accelerator_orders(problem.cluster, sum(counts), most=1000)
        assert orders is not None
        ends = list(itertools.combinations(range(units - 1), len(counts) - 1))
        picked = [(*ends[rng.integers(len(ends))], units - 1) for _ in range(4)]
        taken = [orders[rng.integers(len(orders))] for _ in picked]
        cases = PlanCases(
            tables=tables,
            hardware=hardware,
            microbatches=microbatches,
            counts=counts,
            cuts=np.array(picked),
            orders=np.array(taken),
        )
        spaces = [DATA_PARALLEL] if len(counts) == 1 < counts[0] else order_spaces(problem.request)
        for space in spaces:
            if not space.allows(counts) or max(counts) > microbatches:
                continue
            for order in space.usual(counts, microbatches):
                _check_times(cases, order, hardware)
                relaxed = cases.bound(order, best_dealt=True)
                for dealt, own in dealt_orders(cases, order, np.arange(4)):
                    some = cases.of(own)
                    assert (relaxed[own] <= some.bound(dealt) * (1 + 1e-9)).all()
                    _check_times(some, dealt, hardware)


def _check_times(cases: PlanCases, order: PlannedOrder, hardware: Hardware) -> None:
    """The simulator says the same, no bound is beaten, and what may not fit does not."""
    every = np.arange(len(cases))
    times, least, fits = cases.times(order, every), cases.bound(order), cases.may_fit(order)
    assert times is not None
    for case in every:
        found = evaluate(cases.candidate(case, order, "tried"), hardware)
        assert times[case] == pytest.approx(found.timeline.time, rel=1e-9)
        assert least[case] <= found.timeline.time * (1 + 1e-9)
        assert fits[case] or found.short is not None
