"""The search is its list of passes: what each adds to the state, and what is kept for the plan."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from bapipe.cli import plan as plan_cli
from bapipe.errors import BaPipeError
from bapipe.planner import Request, candidate_costs, evaluate, explore, make_plan, plan_timeline
from bapipe.planner.candidate import Hardware
from bapipe.planner.fixed_partitions import dealt_stages
from bapipe.planner.passes import PASSES
from bapipe.planner.passes.choose_sizes import choose_sizes
from bapipe.planner.passes.replicate import replicate_pipelines
from bapipe.planner.passes.require_plan import require_plan
from bapipe.planner.passes.search_cuts import search_cuts
from bapipe.planner.passes.try_sizes import try_sizes
from bapipe.planner.pipelines import FAMILIES, build, with_cuts
from bapipe.planner.state import SearchState
from command import bapipe
from made_profiles import made_cluster, made_profile

PROFILE = made_profile({"x": [1.0, 4.0, 1.0, 1.0, 2.0, 3.0]}, boundary=[0.5, 0.1, 0.9, 0.2, 0.3, 0.0])
CLUSTER = made_cluster({"x": 4}, bandwidth=1.0)


def started(**asked: Any) -> SearchState:
    return SearchState(
        profile=PROFILE,
        hardware=Hardware(cluster=CLUSTER),
        request=Request(global_batch=16, microbatch=1, **asked),
        global_batch=16,
        sizes=(1,),
    )


def counted(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> list[str]:
    """A list that grows by each call of a function."""
    calls: list[str] = []
    true: Callable[..., Any] = getattr(module, name)

    def counting(*args: Any, **more: Any) -> Any:
        calls.append(name)
        return true(*args, **more)

    monkeypatch.setattr(module, name, counting)
    return calls


def test_passes_add_in_their_order() -> None:
    state = started()
    choose_sizes(state)
    assert state.tried_sizes == (1,)
    assert not state.incumbents.by_family
    with pytest.raises(BaPipeError, match="nothing can be tried"):
        require_plan(state)
    try_sizes(state)
    families = set(state.incumbents.by_family)
    assert {"1f1b-sno", "1f1b", "zb", "gpipe", "1f1b-sno, hybrid", "data-parallel, accumulated"} <= families
    require_plan(state)
    tried = state.incumbents.count
    replicate_pipelines(state)
    assert state.incumbents.count > tried
    assert started().incumbents.count == 0


def test_the_list_of_passes_is_the_search() -> None:
    state = started()
    for run in PASSES:
        assert run.__doc__
        assert run(state) is None
    found = explore(PROFILE, CLUSTER, Request(global_batch=16, microbatch=1))
    assert state.best.candidate.label == found.best.candidate.label
    assert state.best.time == found.best.time
    assert state.incumbents.count == found.evaluated
    assert state.estimates == found.estimates


def test_the_search_by_simulation_finds_faster_cuts_and_rules_out_the_rest() -> None:
    state = started(stages=3, schedule="1f1b-so")
    stages = dealt_stages([1, 2], [1, 1, 1], len(PROFILE.layers))
    state.consider("1f1b-so", build(state.chain(1), stages, FAMILIES["1f1b-so"], 16, state.hardware))
    state.tried_sizes = (1,)
    before = state.best
    search_cuts(state)
    assert state.best.time < before.time
    assert state.best.short is None
    assert state.unsearched == math.inf
    last = len(PROFILE.layers) - 1
    every = (with_cuts(stages, (*cuts, last)) for cuts in itertools.combinations(range(last), 2))
    times = [evaluate.evaluate(replace(before.candidate, stages=own), state.hardware).time for own in every]
    assert state.best.time == pytest.approx(min(times))


def test_a_share_of_the_cluster_is_searched_on_its_own() -> None:
    state = started()
    own = state.narrowed(Request(global_batch=8, stages=2), sizes=(1,), cluster=made_cluster({"x": 2}))
    assert (own.global_batch, len(own.cluster), own.incumbents.by_family) == (8, 2, {})
    assert own.chain(1) is state.chain(1)
    other = state.narrowed(Request(global_batch=8), sizes=(1,), cluster=made_cluster({"y": 2}))
    assert other.chains is not state.chains


def test_the_plan_keeps_what_the_search_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    found = explore(PROFILE, CLUSTER, Request(global_batch=16, microbatch=1))
    calls = [
        counted(monkeypatch, module, name)
        for module, name in (
            (evaluate, "simulate"),
            (plan_timeline, "simulate"),
            (evaluate, "stages_bytes"),
            (candidate_costs, "stage_seconds"),
        )
    ]
    plan = make_plan(found)
    assert calls == [[], [], [], []]
    assert plan_timeline.plan_timeline(plan).time == pytest.approx(found.best.timeline.time)
    assert calls == [[], ["simulate"], [], []]


def test_one_search_serves_the_table_the_explanation_and_the_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    searches = counted(monkeypatch, plan_cli, "explore")
    simulated = counted(monkeypatch, evaluate, "simulate")
    drawn = counted(monkeypatch, plan_timeline, "simulate")
    asked = ("plan", "vgg16", "--cluster", "2xv100", "--global-batch", "128", "--microbatch", "16")
    files = ("--out", "plan.json", "--report", "report.html")
    at_report: list[int] = []
    true = plan_cli.make_plan
    monkeypatch.setattr(plan_cli, "make_plan", lambda found: (at_report.append(len(simulated)), true(found))[1])
    done = bapipe(*asked, "--explain", *files, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "inter-layer" in done.stdout
    assert "inter-layer" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert searches == ["explore"]
    assert [len(simulated)] == at_report, "simulated again after the search"
    assert drawn == []


def test_the_explanation_does_not_change_the_plan() -> None:
    request = Request(global_batch=16, microbatch=1)
    plain, explained = (explore(PROFILE, CLUSTER, request, explain=explain) for explain in (False, True))
    assert make_plan(plain) == make_plan(explained)
    assert plain.paper_steps == ()
    assert next(step.name for step in explained.paper_steps) == "inter-layer"


def test_what_the_paper_cannot_fit_is_explained_too() -> None:
    """The paper's partitions do not recompute; a plan that does may fit where none of them does."""
    profile = made_profile({"x": [1.0] * 4}, weights=[8.0] * 4, saved_activations=[10.0] * 4, sizes=(1,))
    cluster = made_cluster({"x": 2}, memory=60.0)
    request = Request(global_batch=8, schedule="1f1b", stages=2)
    found = explore(profile, cluster, request, explain=True)
    assert any(stage.recomputed for stage in make_plan(found).stages)
    assert any("short" in step.change for step in found.paper_steps)
