"""The public functions do what their names say, whatever was imported before them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import bapipe
from bapipe.planner.plan_timeline import plan_timeline
from made_runs import made_run, stretched

EVERYTHING = """
import pkgutil, importlib, bapipe
for module in pkgutil.walk_packages(bapipe.__path__, "bapipe."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for name in bapipe.__all__:
    found = getattr(bapipe, name)
    assert not type(found).__name__ == "module", name
assert bapipe.plan("alexnet", "2xv100", global_batch=64).global_batch == 64
"""


def test_no_submodule_hides_a_public_name() -> None:
    done = subprocess.run([sys.executable, "-c", EVERYTHING], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_three_lines_plan_a_model(tmp_path: Path) -> None:
    plan = bapipe.plan("bert-base", "4xv100", global_batch=256, schedule="1f1b-so", stages=4)
    assert [stage.accelerators for stage in plan.stages] == [(f"node0/{index}",) for index in range(4)]
    assert plan.global_batch == 256
    bapipe.write_plan(plan, tmp_path / "plan.json")
    assert bapipe.read_plan(tmp_path / "plan.json") == plan
    bapipe.write_report(plan, tmp_path / "report.html")
    assert "bert-base" in (tmp_path / "report.html").read_text()


def test_a_cluster_and_a_profile_are_taken_as_values_too(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    profile = bapipe.profile(module, (torch.randn(2, 16),), micro_batches=(1, 2), accelerator="cpu-core")
    assert [table.microbatches for table in profile.accelerators.values()] == [(1, 2)]
    cluster = bapipe.read_cluster("2xcpu-core")
    plan = bapipe.plan(profile, cluster, global_batch=8)
    assert plan.profile_hash == profile.hash
    bapipe.write_profile(profile, tmp_path / "profile.json")
    assert bapipe.plan(tmp_path / "profile.json", cluster, global_batch=8) == plan


def test_a_run_is_compared_with_its_plan() -> None:
    plan = bapipe.plan("alexnet", "2xv100", global_batch=64, schedule="1f1b-so", stages=2)
    slower = stretched(plan_timeline(plan), 1.25)
    found = bapipe.compare(plan, made_run(plan, slower))
    assert found.time.error == pytest.approx(1 / 1.25 - 1)


def test_this_machine_is_a_cluster() -> None:
    cluster = bapipe.detect_cluster(ranks=2)
    assert len(cluster.accelerators) == 2
    assert all(kind.memory > 0 for kind in cluster.types.values())


def test_boards_are_planned_as_boards() -> None:
    plan = bapipe.plan("resnet50", "2xvcu129", global_batch=64)
    assert plan.deployment is not None


def test_schedules_are_simulated() -> None:
    schedule = bapipe.make_schedule("1f1b-so", 4, 16)
    timeline = bapipe.simulate(schedule, bapipe.Costs.of(4, forward=10, backward=20, transfer=5))
    assert timeline.time > 16 * 30


def test_what_is_wrong_is_said_in_one_line() -> None:
    with pytest.raises(bapipe.BaPipeError, match="unknown model 'bert-lage'") as caught:
        bapipe.plan("bert-lage", "4xv100")
    assert "did you mean 'bert-large'" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_every_public_function_documents_itself() -> None:
    for name in bapipe.__all__:
        if inspect.isroutine(getattr(bapipe, name)):
            assert inspect.getdoc(getattr(bapipe, name)), name
