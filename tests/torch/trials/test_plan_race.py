"""Races of plans whose runs are simulated: what they show decides what else is raced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bapipe.analysis.recalibrate import predict_again
from bapipe.costs.profile import Profile
from bapipe.costs.profile_ways import has_both_ways, join_ways, of_way
from bapipe.planner import Request, explore, make_plan
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.records.plan import Plan
from made_profiles import made_cluster, made_profile
from made_runs import made_run

pytest.importorskip("torch", reason="running is torch's: pip install bapipe[torch]")

from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.trials import plan_race
from bapipe.torch.trials import probe as probes
from bapipe.torch.trials.plan_race import race_found, with_measured_time
from bapipe.torch.trials.trial_record import Trial


def test_what_a_race_shows_is_raced_in_a_second_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the profile two stages of four layers are best; in truth each of the last four takes five times as long.
    The raced plans show it, and the plan that suits is found and raced against them."""
    profile, truth = (
        made_profile({"x": [1.0] * 4 + [last] * 4}, boundary=[0.01] * 8, weights=[4.0] * 8) for last in (1.0, 5.0)
    )
    cluster = made_cluster({"x": 2}, bandwidth=1.0)
    asked = Request(global_batch=8, microbatch=1, schedule="1f1b-so", stages=2)
    raced: list[list[Plan]] = []

    def simulated(plans: Sequence[Plan], _: RunOptions, **__: object) -> tuple[Trial, ...]:
        raced.append(list(plans))
        timelines = [plan_timeline(predict_again(plan, truth)) for plan in plans]
        return tuple(
            Trial(plan=plan, records=(made_run(plan, timeline),))
            for plan, timeline in zip(plans, timelines, strict=True)
        )

    monkeypatch.setattr(plan_race, "run_trials", simulated)
    found = explore(profile, cluster, replace(asked, layer_error=0.2, link_error=0.0))
    said: list[str] = []
    result = race_found(found, RunOptions(), limit=2, code=tmp_path, report=said.append)
    assert result is not None
    cuts = [[plan.stages[0].last_layer for plan in plans] for plans in raced]
    assert [len(plans) for plans in raced] == [2, 2]
    assert 5 not in cuts[0]
    assert cuts[1][1] == 5
    assert result.best.plan.stages[0].last_layer == 5
    assert len(result.trials) == 3
    assert result.best.plan.profile_hash == profile.hash
    assert [line.split(" that")[0].split(" whose")[0] for line in said] == [
        "racing 2 plans",
        "racing the fastest with 1 more plan",
    ]


def test_a_race_whose_runs_are_as_predicted_has_one_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = made_profile({"x": [1.0, 1.0, 1.0, 1.0]}, boundary=[0.01] * 4, weights=[4.0] * 4)
    rounds: list[int] = []

    def simulated(plans: Sequence[Plan], _: RunOptions, **__: object) -> tuple[Trial, ...]:
        rounds.append(len(plans))
        return tuple(Trial(plan=plan, records=(made_run(plan, plan_timeline(plan)),)) for plan in plans)

    monkeypatch.setattr(plan_race, "run_trials", simulated)
    asked = Request(global_batch=8, microbatch=1, schedule="1f1b-so", stages=2, layer_error=0.2, link_error=0.0)
    found = explore(profile, made_cluster({"x": 2}, bandwidth=1.0), asked)
    assert race_found(found, RunOptions(), limit=2, code=tmp_path) is not None
    assert rounds == [2]


def test_a_race_has_three_rounds_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many plans there are that the runs so far speak for."""
    profile, raced = made_profile({"x": [1.0] * 8}, boundary=[0.01] * 8, weights=[4.0] * 8), list[list[Plan]]()
    monkeypatch.setattr(plan_race, "run_trials", simulated_by(profile, raced))
    cluster = made_cluster({"x": 2}, bandwidth=1.0)
    asked = Request(global_batch=8, microbatch=1, schedule="1f1b-so", stages=2, layer_error=0.2, link_error=0.0)
    others = [replace(make_plan(explore(profile, cluster, asked)), notes=(str(number),)) for number in range(9)]
    seen: list[list[Plan]] = []

    def more(*_: object, **__: object) -> tuple[Plan, ...]:
        seen.append([plan for plans in raced for plan in plans])
        return (others.pop(),)

    monkeypatch.setattr(plan_race, "unraced_candidates", more)
    result = race_found(explore(profile, cluster, asked), RunOptions(), limit=2, code=tmp_path)
    assert result is not None
    assert [len(plans) for plans in raced] == [2, 2, 2]
    assert [len(plans) for plans in seen] == [2, 4]
    assert len(result.trials) == 4


def simulated_by(truth: Profile, raced: list[list[Plan]]) -> Callable[..., tuple[Trial, ...]]:
    """Runs of plans whose layers take what the profile has for the way that they run."""

    def run(plans: Sequence[Plan], _: RunOptions, **__: object) -> tuple[Trial, ...]:
        raced.append(list(plans))
        timelines = [plan_timeline(predict_again(plan, of_way(truth, compiled=plan.compiled))) for plan in plans]
        return tuple(
            Trial(plan=plan, records=(made_run(plan, timeline),))
            for plan, timeline in zip(plans, timelines, strict=True)
        )

    return run


def both_ways(compiled: float) -> Profile:
    """Eight layers of 1 s as captured, and of so many compiled."""
    ways = [
        replace(made_profile({"x": [work] * 8}, boundary=[0.01] * 8, weights=[4.0] * 8), compiled=way)
        for work, way in ((1.0, False), (compiled, True))
    ]
    return join_ways(*ways)


@pytest.mark.parametrize(("predicted", "real"), [(0.95, 1.2), (1.05, 0.8), (0.95, 0.9)])
def test_stages_as_captured_and_compiled_race_and_the_faster_is_kept(
    predicted: float, real: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, raced = both_ways(predicted), list[list[Plan]]()
    monkeypatch.setattr(plan_race, "run_trials", simulated_by(both_ways(real), raced))
    asked = Request(global_batch=8, microbatch=1, schedule="1f1b-so", stages=2, layer_error=0.2, link_error=0.0)
    found = explore(profile, made_cluster({"x": 2}, bandwidth=1.0), asked)
    assert found.compiled == (predicted < 1)
    result = race_found(found, RunOptions(), limit=3, code=tmp_path)
    assert result is not None
    assert {plan.compiled for plan in raced[0]} == {True, False}
    assert result.best.plan.compiled == (real < 1)
    # Only plans that run as the fastest does are looked for again.
    assert all(plan.compiled == (real < 1) for plans in raced[1:] for plan in plans)
    plan = with_measured_time(result.best, profile)
    assert plan.compiled == (real < 1)
    assert plan.prediction.time == result.best.seconds
    assert plan.profile_hash == of_way(profile, compiled=plan.compiled).hash


def test_short_runs_correct_each_way_by_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile, raced = both_ways(0.5), list[list[Plan]]()
    cluster, truth = made_cluster({"x": 2}, bandwidth=1.0), both_ways(2.0)
    monkeypatch.setattr(probes, "run_trials", simulated_by(truth, raced))
    plans = probes.probe_plans(profile, cluster, Request(), 8)
    assert [plan.compiled for plan in plans] == [False] * 3 + [True] * 3
    found, _ = probes.probe(profile, cluster, plans, RunOptions(), code=tmp_path)
    for compiled in (False, True):
        own, real = (of_way(item, compiled=compiled).at("x", 1) for item in (found.profile, truth))
        assert own.forward == pytest.approx(real.forward, rel=1e-3)
        assert own.backward == pytest.approx(real.backward, rel=1e-3)
    assert any(line.startswith("compiled: layers of x") for line in found.changes)


@pytest.mark.parametrize("runs", [False, True])
def test_where_no_plan_of_one_way_runs_the_other_way_is_left(
    runs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, cluster = both_ways(0.5), made_cluster({"x": 2}, bandwidth=1.0)
    run = simulated_by(profile, [])

    def failing(plans: Sequence[Plan], options: RunOptions, **more: object) -> tuple[Trial, ...]:
        return tuple(
            trial if trial.plan.compiled == runs else replace(trial, records=(), failure="no kernel")
            for trial in run(plans, options, **more)
        )

    monkeypatch.setattr(probes, "run_trials", failing)
    plans = probes.probe_plans(profile, cluster, Request(), 8)
    found, _ = probes.probe(profile, cluster, plans, RunOptions(), code=tmp_path)
    assert not has_both_ways(found.profile)
    assert found.profile.compiled == runs
    ways = ("as captured", "compiled") if runs else ("compiled", "as captured")
    assert f"no plan could be run {ways[0]}: stages run {ways[1]}" in found.changes
    assert runs or any(
        line.endswith("compiled, at micro-batch 1 failed and says nothing: no kernel") for line in found.changes
    )
