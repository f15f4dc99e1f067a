"""The joint search on small cases whose answer is known."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from bapipe.errors import BaPipeError, InfeasibleError
from bapipe.io.files import dump_json
from bapipe.planner import STRATEGIES, Request, explore, lower_bound, make_plan
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.planner.tuning import DEFAULT_TUNING
from made_profiles import made_cluster, made_profile


def alike(count: int = 8, seconds: float = 1.0, **more):
    return made_profile({"x": [seconds] * count}, **more)


def test_equal_layers_on_equal_accelerators_get_equal_stages() -> None:
    found = explore(
        alike(), made_cluster({"x": 4}), Request(global_batch=32, microbatch=1, stages=4, schedule="1f1b-so")
    )
    plan = make_plan(found)
    assert [(stage.first_layer, stage.last_layer) for stage in plan.stages] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    # (M + N − 1)(F + B) with 2 s a stage, and no communication.
    assert plan.prediction.time == pytest.approx((32 + 3) * 2.0)
    assert plan.prediction.lower_bound == pytest.approx(32 * 8 / 4)
    assert plan.prediction.gap == pytest.approx(35 / 32 - 1)
    assert plan.kind == "pipeline"


def test_on_one_accelerator_schedules_that_do_the_same_are_one_alternative() -> None:
    plan = make_plan(explore(alike(), made_cluster({"x": 1}), Request(global_batch=8, microbatch=1)))
    assert plan.prediction.time == pytest.approx(8 * 8.0)
    names = [own.name for own in plan.alternatives if "recomput" not in own.name]
    assert not [name for name in names if "one accelerator" in name]
    again = [own for own in plan.alternatives if "recomput" in own.name]
    assert len(again) == 1
    assert again[0].reason.endswith("repeats forwards")


def test_fast_accelerators_get_more_layers_and_any_order_is_tried() -> None:
    profile = made_profile({"fast": [1.0] * 12, "slow": [2.0] * 12})
    cluster = made_cluster({"fast": 2, "slow": 2})
    plan = make_plan(
        explore(profile, cluster, Request(global_batch=64, microbatch=1, stages=4, schedule="1f1b-so"))
    )
    layers = {stage.accelerators[0]: stage.last_layer - stage.first_layer + 1 for stage in plan.stages}
    assert sorted(layers.values()) == [2, 2, 4, 4]
    assert layers["node/0"] == layers["node/1"] == 4
    assert any("a perfect split would take 4 s" in note for note in plan.notes)


def test_a_chain_keeps_the_order_of_its_cabling() -> None:
    profile = made_profile({"fast": [1.0] * 9, "slow": [2.0] * 9})
    cluster = made_cluster({"slow": 1, "fast": 1}, topology="chain")
    plan = make_plan(
        explore(profile, cluster, Request(global_batch=8, microbatch=1, stages=2, schedule="1f1b-so"))
    )
    assert [stage.accelerators for stage in plan.stages] == [("node/0",), ("node/1",)]
    assert plan.stages[0].last_layer == 2


def test_data_parallelism_wins_where_weights_are_small_and_boundaries_large() -> None:
    profile = alike(boundary=[1e9] * 8, weights=[1.0] * 8)
    plan = make_plan(explore(profile, made_cluster({"x": 4}, bandwidth=1e9), Request(global_batch=16)))
    assert plan.kind == "data-parallel"
    assert len(plan.stages) == 1
    assert plan.stages[0].accelerators == ("node/0", "node/1", "node/2", "node/3")


def test_a_pipeline_wins_where_weights_are_large_and_boundaries_small() -> None:
    profile = alike(boundary=[1.0] * 8, weights=[1e9] * 8)
    plan = make_plan(explore(profile, made_cluster({"x": 4}, bandwidth=1e8), Request(global_batch=64)))
    assert plan.kind == "pipeline"
    dp = [alternative for alternative in plan.alternatives if alternative.name.startswith("data parallelism")]
    assert dp
    assert "slower" in dp[0].reason


def test_accumulation_is_compared_at_the_same_global_batch() -> None:
    found = explore(alike(weights=[1e6] * 8), made_cluster({"x": 2}, bandwidth=1e6), Request(global_batch=16))
    for evaluation in found.considered:
        assert evaluation.samples == 16


def test_memory_is_a_hard_limit_and_shapes_the_choice() -> None:
    # Every micro-batch keeps 1 byte a layer: gpipe's 16 at 4 layers a stage do not fit in 40 bytes, 1f1b's 2 do.
    profile = alike(count=8, saved_activations=[1.0] * 8, sizes=(1,))
    cluster = made_cluster({"x": 2}, memory=40.0)
    found = explore(profile, cluster, Request(global_batch=16, stages=2))
    assert found.best.short is None
    lost = [evaluation for evaluation in found.considered if evaluation.candidate.label.startswith("gpipe, ")]
    assert lost[0].short == (0, pytest.approx(16 * 4 - 40.0))


def test_nothing_fits_says_what_and_what_would_help() -> None:
    profile = alike(weights=[100.0] * 8, sizes=(1,))
    with pytest.raises(InfeasibleError, match=r"nothing fits: the closest, .* short on stage .*layer.*would help"):
        explore(profile, made_cluster({"x": 2}, memory=300.0), Request(global_batch=4))


@pytest.mark.parametrize("schedule", ["1f1b-sno", "1f1b-so", "1f1b", "gpipe", "zb-h1", "zb-h2", "interleaved"])
def test_a_forced_schedule_is_honoured(schedule: str) -> None:
    plan = make_plan(explore(alike(), made_cluster({"x": 2}), Request(global_batch=16, schedule=schedule)))
    assert plan.schedule.name == schedule


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_gives_a_plan_that_exact_does_not_lose_to(strategy: str) -> None:
    profile = made_profile({"x": [1.0, 4.0, 1.0, 1.0, 2.0, 3.0]}, boundary=[0.5, 0.1, 0.9, 0.2, 0.3, 0.0])
    cluster = made_cluster({"x": 3}, bandwidth=1.0)
    exact = explore(profile, cluster, Request(global_batch=12))
    other = explore(profile, cluster, Request(global_batch=12, strategy=strategy))
    assert exact.best.time <= other.best.time * (1 + 1e-12)


def test_what_cannot_be_forced_is_refused_with_the_reason() -> None:
    cluster = made_cluster({"x": 2})
    with pytest.raises(BaPipeError, match=r"3 stages need as many accelerators, the cluster has 2"):
        explore(alike(), cluster, Request(stages=3))
    with pytest.raises(BaPipeError, match=r"covers micro-batches of 1 to 4, asked for 64"):
        explore(alike(), cluster, Request(global_batch=64, microbatch=64))
    with pytest.raises(BaPipeError, match=r"schedule fbp-as does not suit these accelerators"):
        explore(alike(), cluster, Request(global_batch=8, schedule="fbp-as"))
    with pytest.raises(BaPipeError, match=r"did you mean '1f1b-so'"):
        Request(schedule="1f1b-s0")
    with pytest.raises(BaPipeError, match=r"2 stages need at least 2 layers"):
        explore(alike(count=1), cluster, Request(global_batch=8, stages=2))


def test_the_same_input_gives_the_same_bytes() -> None:
    texts = {
        dump_json(make_plan(explore(alike(boundary=[1.0] * 8), made_cluster({"x": 4}, bandwidth=10.0))))
        for _ in range(2)
    }
    assert len(texts) == 1


def test_a_plan_tells_its_own_timeline() -> None:
    found = explore(alike(boundary=[1.0] * 8, weights=[8.0] * 8), made_cluster({"x": 4}, bandwidth=10.0))
    plan = make_plan(found)
    assert plan_timeline(plan).time == pytest.approx(plan.prediction.time)


def test_stages_that_are_asked_for_are_what_is_planned() -> None:
    """No interleaving either, which gives an accelerator several stages, unless that is asked for too."""
    profile = made_profile({"x": [3.0] * 8}, boundary=[0.01] * 8)
    cluster = made_cluster({"x": 2}, bandwidth=1.0)
    request = Request(global_batch=8, microbatch=1, stages=2)
    found = explore(profile, cluster, request)
    assert {len(item.candidate.stages) for item in found.considered} == {2}
    assert len(explore(profile, cluster, replace(request, schedule="interleaved")).best.candidate.stages) == 4


def test_the_papers_space_has_pipelines_without_replicas_and_plain_data_parallelism_only() -> None:
    found = explore(alike(weights=[4.0] * 8), made_cluster({"x": 4}, bandwidth=10.0), Request(space="paper"))
    names = {evaluation.candidate.schedule.name for evaluation in found.considered}
    assert names == {"1f1b-sno", "1f1b-so", "data-parallel"}
    for evaluation in found.considered:
        if evaluation.candidate.schedule.name == "data-parallel":
            assert evaluation.candidate.schedule.num_microbatches == 4


def test_more_accelerators_are_no_help_where_one_layer_is_too_large() -> None:
    cluster = made_cluster({"x": 2}, memory=10.0)
    many = made_profile({"x": [1.0] * 4}, boundary=[1.0] * 4, weights=[8.0] * 4)
    with pytest.raises(InfeasibleError, match=r"; more accelerators$"):
        explore(many, cluster, Request(global_batch=4))
    large = made_profile({"x": [1.0] * 2}, boundary=[1.0] * 2, weights=[8.0, 80.0])
    with pytest.raises(InfeasibleError, match=r"any of these would help: accelerators of \S+ \S+$"):
        explore(large, cluster, Request(global_batch=4))


def test_the_lower_bound_holds_for_every_candidate() -> None:
    profile = made_profile({"fast": [1.0] * 6, "slow": [3.0] * 6}, boundary=[0.2] * 6)
    cluster = made_cluster({"fast": 1, "slow": 2}, bandwidth=1.0)
    found = explore(profile, cluster, Request(global_batch=12))
    assert found.lower_bound == lower_bound(profile, cluster, 12)
    assert all(evaluation.time >= found.lower_bound for evaluation in found.considered)


def test_asynchronous_accelerators_choose_between_as_and_fbp() -> None:
    cluster = made_cluster({"x": 3}, topology="chain", execution="asynchronous")
    plan = make_plan(explore(alike(count=6), cluster, Request(global_batch=12, stages=3)))
    assert plan.schedule.name in ("1f1b-as", "fbp-as")


def test_more_than_three_types_are_labelled_a_heuristic() -> None:
    names = ("a", "b", "c", "d")
    profile = made_profile({name: [1.0 + index] * 8 for index, name in enumerate(names)})
    cluster, request = made_cluster(dict.fromkeys(names, 1)), Request(global_batch=8, stages=4)
    tuning = replace(DEFAULT_TUNING, search_steps=0)
    plan = make_plan(explore(profile, cluster, request, tuning=tuning))
    assert any(note.startswith("heuristic") for note in plan.notes)
    assert [stage.accelerators[0] for stage in plan.stages] == ["node/0", "node/1", "node/2", "node/3"]
    searched = make_plan(explore(profile, cluster, request))
    assert searched.prediction.time < plan.prediction.time
    assert not any(note.startswith("heuristic") for note in searched.notes)


@pytest.mark.parametrize(
    ("count", "asked", "words"),
    [
        (
            3,
            {"global_batch": 8, "microbatch": 2, "schedule": "data-parallel"},
            "of 3 x 2; make --global-batch 6 or 12, or",
        ),
        (
            3,
            {"global_batch": 4, "microbatch": 2, "strategy": "dp"},
            "a multiple of 3 x 2; make --global-batch 6, or",
        ),
        (1, {"global_batch": 8, "schedule": "interleaved"}, "at least 2 accelerators, the cluster has 1; leave"),
        (
            2,
            {"global_batch": 4, "schedule": "interleaved", "stages": 1},
            "at least 2 stages, .*; leave --stages out",
        ),
    ],
)
def test_what_leaves_nothing_to_try_is_said(count: int, asked: dict[str, Any], words: str) -> None:
    profile = made_profile({"x": [1.0, 1.0, 1.0]}, sizes=(1, 2))
    with pytest.raises(BaPipeError, match=words):
        explore(profile, made_cluster({"x": count}), Request(**asked))


@pytest.mark.parametrize("weights", [0.0, 3.0], ids=["data parallelism is best", "a pipeline is best"])
def test_an_alternative_is_listed_at_what_a_search_for_its_schedule_alone_finds(weights: float) -> None:
    work = [1.0, 4.0, 1.0, 1.0, 2.0, 3.0]
    made = made_profile({"x": work}, boundary=[0.5, 0.1, 0.9, 0.2, 0.3, 0.0], weights=[weights] * 6)
    cluster, request = made_cluster({"x": 4}, bandwidth=1.0), Request(global_batch=16)
    listed: dict[str, float] = {}
    for own in explore(made, cluster, request).considered:
        if own.short is None:
            name = own.candidate.schedule.name
            listed[name] = min(listed.get(name, math.inf), own.time)
    assert {"1f1b-so", "zb", "zb-h1", "data-parallel"} <= listed.keys()
    for name, time in listed.items():
        alone = explore(made, cluster, replace(request, schedule=name)).best.time
        assert time <= 1.01 * alone, name
