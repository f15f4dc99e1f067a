"""Races of plans whose runs are simulated: what they show decides what else is raced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bapipe.analysis.recalibrate import predict_again
from bapipe.planner import Request, explore
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.records.plan import Plan
from made_profiles import made_cluster, made_profile
from made_runs import made_run

pytest.importorskip("torch", reason="running is torch's: pip install bapipe[torch]")

from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.trials import plan_race
from bapipe.torch.trials.plan_race import race_found
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
