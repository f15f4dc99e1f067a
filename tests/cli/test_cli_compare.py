"""`bapipe compare` as a user starts it: tables, JSON, corrected files, and one clear line for every mistake."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bapipe.analysis.recalibrate import predict_again
from bapipe.costs.profile import read_profile, write_profile
from bapipe.hardware.cluster_file import read_cluster
from bapipe.planner import Request, explore, make_plan
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.records.plan import Plan, write_plan
from bapipe.records.run_record import write_run
from command import bapipe, refused
from made_profiles import made_cluster, made_profile
from made_runs import made_run, stretched


def _written(folder: Path, *, slower: float = 2.0) -> Plan:
    """A plan of two stages, its profile, and a run in which everything took so many times longer."""
    profile = made_profile({"x": [1.0] * 8}, boundary=[0.25] * 8)
    cluster = made_cluster({"x": 2}, bandwidth=1.0)
    plan = make_plan(
        explore(profile, cluster, Request(global_batch=8, microbatch=1, stages=2, schedule="1f1b-sno"))
    )
    write_profile(profile, folder / "profile.json")
    write_plan(plan, folder / "plan.json")
    write_run(made_run(plan, stretched(plan_timeline(plan), slower)), folder / "run.json")
    return plan


def test_tables_and_a_trace(tmp_path: Path) -> None:
    _written(tmp_path)
    done = bapipe("compare", "plan.json", "run.json", "--trace", "trace.json", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for part in (
        "predicted",
        "measured",
        "(-50%)",
        "waits for transfers",
        "link within nodes",
        "wrote trace.json",
    ):
        assert part in done.stdout
    assert json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]


def test_recalibrated_files_predict_what_was_measured(tmp_path: Path) -> None:
    plan = _written(tmp_path, slower=3.0)
    arguments = ("--profile", "profile.json", "--recalibrate", "new.json", "--cluster-out", "new.toml")
    done = bapipe("compare", "plan.json", "run.json", *arguments, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "×3.000" in done.stdout
    time = plan_timeline(plan).time
    assert f"predicted at {3 * time:.3g} s; it took {3 * time:.3g} s" in " ".join(done.stdout.split())
    assert done.stdout.splitlines()[-2:] == ["wrote new.json", "wrote new.toml"]
    profile, cluster = read_profile(tmp_path / "new.json"), read_cluster(str(tmp_path / "new.toml"))
    assert plan_timeline(predict_again(plan, profile, cluster)).time == pytest.approx(3 * time, rel=1e-9)
    assert "links corrected by run" in (tmp_path / "new.toml").read_text(encoding="utf-8")
    again = bapipe("plan", "new.json", "--cluster", "new.toml", "--global-batch", "8", "--micro-batch", "1",
                   "--stages", "2", "--schedule", "1f1b-sno", "--json", folder=tmp_path)  # fmt: skip
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["time"] == pytest.approx(3 * time, rel=1e-9)


def test_json_has_every_figure(tmp_path: Path) -> None:
    plan = _written(tmp_path)
    arguments = ("--profile", "profile.json", "--recalibrate", "new.json")
    done = bapipe("compare", "plan.json", "run.json", *arguments, "--json", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    values = json.loads(done.stdout)
    assert values["time"]["error"] == pytest.approx(-0.5)
    assert {"time", "bubble", "step_seconds", "outside_seconds", "stages", "links", "recalibration"} <= set(values)
    assert values["stages"][0]["busy"]["measured"] == pytest.approx(2 * values["stages"][0]["busy"]["predicted"])
    found = values["recalibration"]
    assert [row["forward"] for row in found["corrections"]] == pytest.approx([2.0, 2.0])
    # Without --cluster-out the links are those of the plan, so the transfers are not yet twice as long.
    assert plan_timeline(plan).time < found["predicted_time"] < values["time"]["measured"]


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    plan = _written(tmp_path)
    compare = ("compare", "plan.json", "run.json")
    assert "--recalibrate needs --profile" in refused(*compare, "--recalibrate", "new.json", folder=tmp_path)
    assert "--profile needs --recalibrate" in refused(*compare, "--profile", "profile.json", folder=tmp_path)
    assert "end it in .toml" in refused(*compare, "--cluster-out", "cluster.json", folder=tmp_path)
    write_profile(replace(read_profile(tmp_path / "profile.json"), dtype="bf16"), tmp_path / "other.json")
    line = refused(*compare, "--profile", "other.json", "--recalibrate", "new.json", folder=tmp_path)
    assert "give the profile that was planned with" in line
    assert not (tmp_path / "new.json").exists()
    write_plan(replace(plan, optimizer="adam"), tmp_path / "other-plan.json")
    assert "give the plan that was run" in refused("compare", "other-plan.json", "run.json", folder=tmp_path)
    write_run(replace(made_run(plan, plan_timeline(plan)), transfers=None), tmp_path / "run.json")
    assert "the run has 0" in refused(*compare, "--cluster-out", "cluster.toml", folder=tmp_path)
