"""The planner's constants are in one place: a search that gets others tries other things."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from bapipe.costs.profile import Profile
from bapipe.costs.segments import make_chain
from bapipe.planner import Exploration, Request, explore, make_plan
from bapipe.planner.candidate import Hardware
from bapipe.planner.fixed_partitions import fixed_partitions
from bapipe.planner.hybrids import balanced_hybrids
from bapipe.planner.tuning import DEFAULT_TUNING, Tuning
from made_profiles import made_cluster, made_profile
from paths import REPOSITORY

WORK = [1.0, 4.0, 1.0, 1.0, 2.0, 3.0]
REQUEST = Request(global_batch=12, microbatch=1)


def uneven(**more: Any) -> Profile:
    return made_profile({"x": WORK}, boundary=[0.5, 0.1, 0.9, 0.2, 0.3, 0.0], **more)


def found(tuning: Tuning, request: Request = REQUEST, **more: Any) -> Exploration:
    return explore(uneven(**more), made_cluster({"x": 4}, bandwidth=1.0), request, tuning=tuning)


@pytest.mark.parametrize(
    ("name", "more", "less"),
    [("thorough_size", 5_000, 0), ("near_best", 100.0, 0.0), ("replicated_pipelines", 6, 0)],
)
def test_a_smaller_limit_leaves_candidates_out(name: str, more: float, less: float) -> None:
    many, few = (found(replace(DEFAULT_TUNING, **{name: value})).evaluated for value in (more, less))
    assert few < many


def test_hybrids_are_as_many_and_as_deep_as_allowed() -> None:
    chain, hardware = make_chain(uneven(), ("x",), 1), Hardware(cluster=made_cluster({"x": 4}, bandwidth=1.0))
    usual = balanced_hybrids(chain, hardware, 8)
    assert balanced_hybrids(chain, hardware, 8, replace(DEFAULT_TUNING, hybrids_simulated=2)) == usual[:2]
    assert {len(stages) for _, stages in usual} == {2, 3}
    shallow = balanced_hybrids(chain, hardware, 8, replace(DEFAULT_TUNING, three_stage_accelerators=3))
    assert {len(stages) for _, stages in shallow} == {2}


def test_pipedreams_programme_runs_on_small_problems() -> None:
    chain, hardware = make_chain(uneven(), ("x",), 1), Hardware(cluster=made_cluster({"x": 4}, bandwidth=1.0))
    usual = fixed_partitions(chain, hardware, REQUEST)
    for changed in ({"pipedream_layers": len(WORK) - 1}, {"pipedream_accelerators": 3}):
        fewer = fixed_partitions(chain, hardware, REQUEST, replace(DEFAULT_TUNING, **changed))
        assert set(fewer) < set(usual)


def test_the_search_by_simulation_says_what_its_limits_left_out() -> None:
    request = replace(REQUEST, stages=3)
    assert found(DEFAULT_TUNING, request).left_out == 0
    left_out = found(replace(DEFAULT_TUNING, shape_cases=3), request).left_out
    assert left_out is not None
    assert 0 < left_out < 1
    assert found(replace(DEFAULT_TUNING, search_steps=0), request).evaluated < found(DEFAULT_TUNING).evaluated


def test_orders_are_made_for_small_pipelines_only() -> None:
    request = replace(REQUEST, stages=4, schedule="zb")
    tuning = replace(DEFAULT_TUNING, search_steps=0, moved_orders=0)
    usual = found(replace(tuning, order_size=0), request)
    assert found(tuning, request).best.time < usual.best.time
    dear = found(replace(tuning, order_worth_memory=0.99), request)
    assert dear.best.time == usual.best.time


def test_layers_are_split_in_as_many_slices() -> None:
    request = replace(REQUEST, split_layers=True, stages=4)
    split = dict.fromkeys(range(len(WORK)), 64)
    coarse, fine = (
        found(replace(DEFAULT_TUNING, slices=slices), request, split=split).best.candidate.chain
        for slices in (2, 8)
    )
    assert len(coarse.units) == 2 * len(WORK)
    assert len(fine.units) == 8 * len(WORK)


def test_the_plan_judges_by_the_constants_of_its_search() -> None:
    wide = replace(DEFAULT_TUNING, as_fast=0.9)
    assert any("slower" in alternative.reason for alternative in make_plan(found(DEFAULT_TUNING)).alternatives)
    assert not any(
        "slower" in alternative.reason for alternative in make_plan(found(wide)).alternatives if alternative.time
    )


def test_a_large_problem_may_split_layers() -> None:
    """Its micro-batch size is chosen by pipelines whose stages cut finer segments than layers."""
    few = replace(DEFAULT_TUNING, thorough_size=0)
    split = dict.fromkeys(range(len(WORK)), 16)
    whole, divided = (
        found(few, replace(REQUEST, split_layers=asked), split=split).best.time for asked in (False, True)
    )
    assert divided <= whole


def test_no_constant_is_without_use() -> None:
    sources = "\n".join(
        path.read_text(encoding="utf-8") for path in (REPOSITORY / "src/bapipe/planner").rglob("*.py")
    )
    for item in fields(Tuning):
        assert f"uning.{item.name}" in sources, item.name
