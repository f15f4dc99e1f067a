"""Where layers and links are known with an error: the plan loses least by it, and predictions have a range."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from bapipe.costs.profile import Profile
from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import Accelerator, Cluster, Link
from bapipe.planner import Exploration, Request, explore, make_plan, race_candidates, unraced_candidates
from bapipe.planner.evaluate import evaluate
from bapipe.planner.order_search import orders_under, takes_orders
from bapipe.planner.outlook import complexity, least_regret
from bapipe.planner.scenarios import Errors, draw_scenarios, edge_scenarios, known_errors
from bapipe.records.plan import read_plan, write_plan
from made_profiles import made_cluster, made_profile
from paths import REPOSITORY

WORK = [1.0, 4.0, 1.0, 1.0, 2.0, 3.0]
REQUEST = Request(global_batch=12)
KNOWING = replace(REQUEST, layer_error=0.05, link_error=0.3)


def profile(spread: float | None = None) -> Profile:
    made = made_profile({"x": WORK}, boundary=[0.5, 0.1, 0.9, 0.2, 0.3, 0.0], weights=[2.0] * 6)
    tables = {name: replace(table, spread=spread) for name, table in made.accelerators.items()}
    return replace(made, accelerators=tables)


def cluster(spread: float = 0.0) -> Cluster:
    return replace(made_cluster({"x": 3}), within=Link(bandwidth=1.0, spread=spread))


@pytest.fixture(scope="module")
def knowing() -> Exploration:
    return explore(profile(), cluster(), KNOWING)


@pytest.fixture(scope="module")
def unsure() -> Exploration:
    return explore(profile(), cluster(), replace(KNOWING, layer_error=0.2))


def test_errors_are_the_requests_or_those_of_profile_and_cluster() -> None:
    made, own = profile(0.04), replace(cluster(0.2), pairs={"node/0 - node/1": Link(bandwidth=2.0, spread=0.1)})
    assert known_errors(made, own, REQUEST) == Errors(layers={"x": 0.04}, links=(0.2, 0.1))
    assert known_errors(made, own, KNOWING) == Errors(layers={"x": 0.05}, links=(0.3, 0.3))
    assert not known_errors(profile(), cluster(), REQUEST).any


def test_without_an_error_nothing_is_weighed() -> None:
    found = explore(profile(), cluster(), REQUEST)
    assert found.outlook is None
    prediction = make_plan(found).prediction
    assert prediction.low is None
    assert prediction.high is None
    chosen, *others = race_candidates(found, limit=3)
    assert race_candidates(found, limit=1) == (chosen,) == (make_plan(found),)
    fastest = [own.time for own in found.considered if own is not found.best and own.short is None]
    assert [plan.prediction.time for plan in others] == fastest[:2]


def test_factors_have_the_spread_that_was_asked_for_and_come_in_mirrored_pairs() -> None:
    drawn = draw_scenarios(Errors(layers={"x": 0.3}, links=(0.0,)), 50, 400, seed=1)
    factors = drawn.layers["x"]
    assert np.median(factors) == pytest.approx(1, rel=0.01)
    assert factors.std() / factors.mean() == pytest.approx(0.3, rel=0.03)
    assert factors[0] * factors[1] == pytest.approx(np.ones(50))
    assert (drawn.links == 1).all()


def test_a_scenario_is_what_the_simulator_says_of_its_chain_and_cluster(knowing: Exploration) -> None:
    outlook = knowing.outlook
    assert outlook is not None
    scenarios = draw_scenarios(outlook.errors, len(WORK), 3, seed=9)
    times = scenarios.times(outlook.evaluations, knowing.hardware)
    for index, own in enumerate(outlook.evaluations):
        for number in range(3):
            changed = replace(own.candidate, chain=scenarios.chain(own.candidate.chain, number))
            alone = evaluate(changed, scenarios.hardware(knowing.hardware, number)).time
            assert times[index, number] == pytest.approx(alone, rel=1e-12)


def test_the_choice_has_the_least_regret_but_for_what_is_simpler(knowing: Exploration) -> None:
    outlook = knowing.outlook
    assert outlook is not None
    assert knowing.best is outlook.evaluations[0]
    regret = (outlook.times / outlook.times.min(axis=0)).mean(axis=1) - 1
    assert regret[0] <= regret.min() + knowing.tuning.level_regret
    simple = least_regret(outlook.evaluations, outlook.times, tolerance=100.0)
    orders = [complexity(own.candidate) for own in outlook.evaluations]
    assert orders[simple] == min(orders) < max(orders)


def test_other_candidates_of_a_family_are_weighed_too(knowing: Exploration) -> None:
    assert knowing.outlook is not None
    cuts = {own.candidate.stages for own in knowing.outlook.evaluations if own.candidate.schedule.name == "zb"}
    assert len(cuts) > 1


def test_links_at_the_edge_of_their_error_are_slower_and_faster_together_and_alone() -> None:
    edges = edge_scenarios(Errors(layers={"x": 0.1}, links=(0.3, 0.0, 0.1)), 5, by=2.0)
    assert (edges.layers["x"] == 1).all()
    assert edges.layers["x"].shape == (6, 5)
    slow, fast = edges.links[:3], edges.links[3:]
    assert slow * fast == pytest.approx(np.ones((3, 3)))
    step = np.exp(2 * np.sqrt(np.log1p(np.square([0.3, 0.0, 0.1]))))
    assert slow == pytest.approx(np.stack([step, [step[0], 1, 1], [1, 1, step[2]]]))
    many = edge_scenarios(Errors(layers={"x": 0.1}, links=(0.1,) * 9), 5, by=1.0)
    assert len(many) == 2
    exact = edge_scenarios(Errors(layers={"x": 0.1}, links=(0.0, 0.0, 0.0)), 5, by=1.0)
    assert len(exact) == 0
    both = edges.and_also(exact).and_also(edges)
    assert len(both) == 12
    assert both.layers["x"].shape == (12, 5)


def test_what_is_best_where_links_are_slow_or_fast_is_weighed() -> None:
    """Two fast accelerators in one node and two slow ones in another: replicated stages that suit another link
    than the measured one are not near what suits that."""
    members = tuple(
        Accelerator(name=f"{node}/{index}", type=kind, node=node)
        for node, kind in (("one", "x"), ("two", "y"))
        for index in (0, 1)
    )
    base = made_cluster({"x": 1, "y": 1})
    nodes = replace(
        base,
        accelerators=members,
        within=Link(bandwidth=2.0, latency=0.0),
        between=Link(bandwidth=0.3, latency=0.0),
    )
    made = made_profile(
        {"x": [1.0, 2.0, 1.0, 1.0], "y": [4.0, 8.0, 4.0, 4.0]}, boundary=[0.5, 0.2, 0.4, 0.0], weights=[1.0] * 4
    )
    found = explore(made, nodes, KNOWING)
    assert found.outlook is not None
    edges = edge_scenarios(found.outlook.errors, 4, by=found.tuning.edge_errors)
    weighed = edges.times(found.outlook.evaluations, found.hardware).min(axis=0)
    for number in (0, len(edges) // 2):
        best = explore(made, edges.hardware(found.hardware, number).cluster, REQUEST).best
        assert weighed[number] <= best.time * 1.002


def test_orders_made_for_other_times_are_weighed_too(knowing: Exploration) -> None:
    """The same stages in several zero-bubble orders; each is a plan of its own for the race."""
    assert knowing.outlook is not None
    orders: dict[object, set[tuple[bytes, ...]]] = {}
    for own in knowing.outlook.evaluations:
        candidate = own.candidate
        if candidate.schedule.name == "zb":
            lanes = tuple(lane.kinds.tobytes() + lane.microbatches.tobytes() for lane in candidate.schedule.lanes)
            orders.setdefault((candidate.chain.microbatch, candidate.stages), set()).add(lanes)
    assert max(map(len, orders.values())) > 1


def test_an_order_for_other_times_keeps_the_predicted_ones(knowing: Exploration) -> None:
    """It is made for a slow link, and timed by the links that were measured."""
    start = next(own for own in knowing.considered if takes_orders(own, knowing.tuning))
    candidate, hardware = start.candidate, knowing.hardware
    slower = replace(hardware.cluster.within, bandwidth=hardware.cluster.within.bandwidth / 20)
    changed = replace(hardware, cluster=replace(hardware.cluster, within=slower))
    made = list(orders_under(candidate, hardware, [(candidate.chain, changed)], knowing.tuning))
    assert all(own.chain is candidate.chain and own.stages == candidate.stages for own in made)
    usual, other = evaluate(made[0], hardware).time, evaluate(made[-1], hardware).time
    assert usual <= other * (1 + 1e-9)
    assert evaluate(made[-1], changed).time <= evaluate(made[0], changed).time * (1 + 1e-9)


def test_the_range_lies_around_the_time_and_is_written_and_read(knowing: Exploration, tmp_path: Path) -> None:
    plan = make_plan(knowing)
    low, high = plan.prediction.low, plan.prediction.high
    assert low is not None
    assert high is not None
    assert low < plan.prediction.time < high
    timed = [
        alternative
        for alternative in plan.alternatives
        if alternative.time is not None
        and "by formula" not in alternative.name
        and " of torch" not in alternative.name  # which are not timed in scenarios
    ]
    assert timed
    assert all(alternative.low is not None and alternative.high is not None for alternative in timed)
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan


def test_more_error_makes_a_wider_range(knowing: Exploration, unsure: Exploration) -> None:
    wide, narrow = (make_plan(found).prediction for found in (unsure, knowing))
    assert wide.low
    assert wide.high
    assert narrow.low
    assert narrow.high
    assert wide.high / wide.low > narrow.high / narrow.low


def test_within_the_error_no_percentage_is_given(unsure: Exploration) -> None:
    reasons = [alternative.reason for alternative in make_plan(unsure).alternatives]
    assert any(reason.startswith("within error of the best") for reason in reasons)


def test_a_race_starts_with_the_choice_and_has_no_plan_twice(unsure: Exploration) -> None:
    plans = race_candidates(unsure)
    assert plans[0] == make_plan(unsure)
    assert 1 < len(plans) <= 6
    assert race_candidates(unsure, limit=2) == plans[:2]
    shapes = [(plan.stages, plan.schedule, plan.microbatch_size) for plan in plans]
    assert all(one not in shapes[:index] for index, one in enumerate(shapes))


def test_a_second_round_has_what_may_beat_the_fastest_run(unsure: Exploration) -> None:
    """A time that none can beat leaves nobody; one that is easy to beat brings the fastest in the mean first."""
    outlook = unsure.outlook
    assert outlook is not None
    samples = outlook.evaluations[0].samples
    assert outlook.improving(3, beat=outlook.times.min() / samples, worth=1e-3) == []
    easy = outlook.times.max() / samples
    several = outlook.improving(3, beat=easy, worth=1e-3)
    assert 1 < len(several) <= 3
    means = outlook.times.mean(axis=1)
    assert several[0] is outlook.evaluations[int(means.argmin())]
    assert several[0] not in outlook.improving(3, beat=easy, worth=1e-3, known=several[:1])


def test_plans_that_ran_are_not_raced_again(unsure: Exploration) -> None:
    raced = race_candidates(unsure, limit=3)
    again = unraced_candidates(unsure, unsure, raced, beat=unsure.best.time, limit=5)
    assert again
    shapes = [(plan.stages, plan.schedule, plan.microbatch_size) for plan in (*raced, *again)]
    assert all(one not in shapes[:index] for index, one in enumerate(shapes))


def test_an_error_of_all_or_more_is_refused() -> None:
    with pytest.raises(BaPipeError, match="--layer-error must be at least 0% and below 100%, got 120%"):
        Request(layer_error=1.2)


@pytest.mark.slow
def test_a_sample_of_the_benchmark_loses_little(monkeypatch: pytest.MonkeyPatch) -> None:
    benchmark = _benchmark(monkeypatch)
    found = [
        regret
        for seed in range(10)
        for regret in benchmark.regrets(benchmark.random_case(seed), seed, 1, "deviation")
    ]
    robust, raced, on = ([getattr(one, name) for one in found] for name in ("robust", "raced", "raced_on"))
    assert np.mean(robust) <= 0.015
    assert np.mean(raced) <= 0.005
    assert max(on) <= 0.01


def _benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = REPOSITORY / "benchmarks" / "uncertainty" / "run.py"
    spec = importlib.util.spec_from_file_location("uncertainty_benchmark", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "uncertainty_benchmark", module)
    spec.loader.exec_module(module)
    return module
