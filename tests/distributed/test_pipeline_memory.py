"""What a rank of a pipeline holds, counted while it trains, beside what is planned."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")

from forked_ranks import read_results, start
from pipeline_memory_worker import MODEL, SCHEDULES, WORLD

from bapipe.planner import Request, explore, make_plan
from bapipe.records.plan import read_plan, write_plan
from bapipe.torch.profiler import MeasureSettings, profile_model
from made_profiles import made_cluster
from warm_python import USUAL_START

HERE = Path(__file__).resolve().parent
SIZE, COUNT = 4, 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plans by bytes that are measured, and by times that are not, so that they are the same on every machine."""
    found = tmp_path_factory.mktemp("pipeline_memory")
    settings = MeasureSettings(microbatches=(SIZE,), folder=found / "cache", seconds=0.001, iterations=1)
    profile = profile_model("gpt", settings=settings, args=MODEL, optimizer="adam(fused=true)").profile
    (table,) = profile.accelerators.values()
    one, two, half, none = (((cost,) * len(profile.layers),) for cost in (1e-3, 2e-3, 1e-3, 0.0))
    table = replace(table, forward=one, backward=two, weight_gradient=half, parting=none, update=none[0])
    profile = replace(profile, accelerators={"x": table})
    cluster = made_cluster({"x": WORLD}, bandwidth=1e10, memory=1e9)
    cluster = replace(cluster, types={"x": replace(cluster.types["x"], kind="cpu")})
    for name in SCHEDULES:
        asked = Request(global_batch=SIZE * COUNT, microbatch=SIZE, schedule=name, optimizer="adam(fused=true)")
        write_plan(make_plan(explore(profile, cluster, asked)), found / f"{name}.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", USUAL_START)  # ranks as a user has them
        start(HERE / "pipeline_memory_worker.py", found, seconds=300)
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_rank_holds_what_is_planned(folder: Path, name: str) -> None:
    """In zero-bubble orders too, whose input gradients let go of what weight gradients do not need."""
    results = read_results(folder, [WORLD] * len(SCHEDULES))[SCHEDULES.index(name)]
    plan = read_plan(folder / f"{name}.json")
    assert len(plan.ranks) == WORLD
    for rank, accelerator in enumerate(plan.ranks):
        assert "error" not in results[rank], results[rank]["error"]
        planned = max(stage.memory_bytes for stage in plan.stages if accelerator in stage.accelerators)
        assert results[rank]["most"] == pytest.approx(planned, rel=0.04), accelerator
