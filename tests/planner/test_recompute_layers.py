"""Layers that recompute where memory lacks: chosen, forced, forbidden, written and read."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from bapipe.costs.profile import Profile
from bapipe.errors import BaPipeError, InfeasibleError
from bapipe.hardware.cluster import Cluster
from bapipe.hardware.cluster_file import with_memory_limit
from bapipe.planner import Exploration, Request, explore, make_plan
from bapipe.records.plan import LayerRun, read_plan, write_plan
from made_profiles import made_cluster, made_profile

LAYERS = 8


@pytest.fixture(scope="module")
def profile() -> Profile:
    """Layers that save 10 bytes a sample and receive 1; two are dear to repeat."""
    work = [3.0, 3.0, 6.0, 3.0, 3.0, 6.0, 3.0, 3.0]
    return made_profile(
        {"x": work},
        boundary=[1.0] * LAYERS,
        weights=[4.0] * LAYERS,
        saved_activations=[10.0] * LAYERS,
        sizes=(1, 2),
    )


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return made_cluster({"x": 2}, bandwidth=1e3)


def _found(profile: Profile, cluster: Cluster, memory: float, recompute: str = "auto") -> Exploration | None:
    request = Request(global_batch=8, recompute=recompute, effort="low")
    try:
        return explore(profile, with_memory_limit(cluster, memory), request)
    except InfeasibleError:
        return None


def test_layers_are_faster_than_whole_stages_at_the_limit(profile: Profile, cluster: Cluster) -> None:
    faster = 0
    for memory in (75.0, 85.0, 95.0):
        stages, layers = (_found(profile, cluster, memory, way) for way in ("stages", "auto"))
        assert layers is not None
        if stages is not None and any(stage.recompute for stage in stages.best.candidate.stages):
            assert layers.best.throughput >= stages.best.throughput
            faster += layers.best.throughput > 1.02 * stages.best.throughput
        assert layers.best.short is None
    assert faster


def test_more_memory_is_never_slower(profile: Profile, cluster: Cluster) -> None:
    sizes = (65.0, 75.0, 85.0, 95.0, 110.0, 140.0, 200.0)
    rates = [0.0 if own is None else own.best.throughput for own in (_found(profile, cluster, m) for m in sizes)]
    assert rates[-1] > 0
    assert all(later >= (1 - 1e-3) * before for before, later in itertools.pairwise(rates)), rates


def test_the_plan_says_which_layers_and_reads_as_it_was_written(
    profile: Profile, cluster: Cluster, tmp_path: Path
) -> None:
    found = _found(profile, cluster, 85.0, "layers")
    assert found is not None
    plan = make_plan(found)
    runs = [run for stage in plan.stages for run in stage.recompute_layers]
    assert runs
    assert not any(stage.recompute for stage in plan.stages)
    repeated = sum(stage.repeated_forward for stage in plan.stages)
    again = [layer for run in runs for layer in range(run.first, run.last + 1)]
    assert repeated == pytest.approx(sum(found.best.candidate.chain.forward[0, again]))
    assert any("recompute" in note for note in plan.notes)
    write_plan(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json") == plan
    older = replace(plan, stages=tuple(replace(stage, recompute_layers=()) for stage in plan.stages))
    write_plan(older, tmp_path / "older.json")
    assert "recompute_layers" not in (tmp_path / "older.json").read_text()


def test_layers_can_be_forced_and_forbidden(profile: Profile, cluster: Cluster) -> None:
    never = _found(profile, cluster, 85.0, "never")
    assert never is None or not never.best.candidate.chain.recompute
    always, some = (_found(profile, cluster, 1e6, way) for way in ("always", "0-1,5"))
    assert always is not None
    assert some is not None
    assert always.best.candidate.chain.recompute == tuple((layer, layer) for layer in range(LAYERS))
    assert some.best.candidate.chain.recompute == ((0, 0), (1, 1), (5, 5))
    for wrong in ("5-2", "x", "3-99"):
        with pytest.raises(BaPipeError, match="--recompute"):
            _found(profile, cluster, 1e6, wrong)


def test_a_plan_with_runs_outside_of_a_stage_is_refused(
    profile: Profile, cluster: Cluster, tmp_path: Path
) -> None:
    found = _found(profile, cluster, 1e6)
    assert found is not None
    plan = make_plan(found)
    wrong = replace(plan.stages[0], recompute_layers=(LayerRun(first=0, last=LAYERS),))
    write_plan(replace(plan, stages=(wrong, *plan.stages[1:])), tmp_path / "plan.json")
    with pytest.raises(BaPipeError, match="recompute, which are not its own"):
        read_plan(tmp_path / "plan.json")
