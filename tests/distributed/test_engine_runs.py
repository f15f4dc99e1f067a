"""`bapipe run --engine torch` and `bapipe compare --engines` as a user starts them."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")

from run_plans import ROOT, small_plan

from bapipe.records.plan import write_plan
from bapipe.records.run_record import read_run
from command import refused


def _bapipe(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("bapipe")), *arguments],
        capture_output=True, text=True, cwd=ROOT, env={**os.environ, "NO_COLOR": "1"}, timeout=300, check=False,
    )  # fmt: skip


def test_a_checkpoint_of_torchs_engine_resumes_under_ours(tmp_path: Path) -> None:
    write_plan(small_plan("1f1b-so", stages=2), tmp_path / "plan.json")
    plan, saved = str(tmp_path / "plan.json"), ("--checkpoint", str(tmp_path / "saved"))
    a, b, c = (str(tmp_path / name) for name in ("a.json", "b.json", "c.json"))
    first = _bapipe("run", plan, "--steps", "2", "--check", "--engine", "torch", "--out", a, *saved)
    assert first.returncode == 0, first.stderr
    assert "gradients differ from one process" in first.stdout
    record = read_run(a)
    assert record.environment.engine == "torch"
    assert record.events
    rest = _bapipe("run", plan, "--steps", "4", "--resume", "--out", b, *saved)
    assert rest.returncode == 0, rest.stderr
    alone = _bapipe("run", plan, "--steps", "4", "--out", c)
    assert alone.returncode == 0, alone.stderr
    whole = [step.loss for step in read_run(c).steps]
    joined = [step.loss for file in (a, b) for step in read_run(file).steps]
    for one, other in zip(joined, whole, strict=True):
        assert one is not None
        assert other is not None
        assert math.isclose(one, other, rel_tol=1e-5)


def test_engines_side_by_side(tmp_path: Path) -> None:
    write_plan(small_plan("1f1b-so", stages=2), tmp_path / "plan.json")
    done = _bapipe("compare", "--engines", str(tmp_path / "plan.json"), "--json")
    assert done.returncode == 0, done.stderr
    ours, torchs = json.loads(done.stdout)
    assert [ours["engine"], torchs["engine"]] == ["bapipe", "torch"]
    for row in (ours, torchs):
        assert row["seconds"] > 0
        assert row["reason"] is None
    for one, other in zip(ours["losses"], torchs["losses"], strict=True):
        assert math.isclose(one, other, rel_tol=1e-6)


def test_what_does_not_go_together_is_one_line(tmp_path: Path) -> None:
    assert "give PLAN_FILE RUN_FILE, or --engines" in refused("compare", "plan.json", folder=tmp_path)
    assert "leave the options about a run out" in refused(
        "compare", "--engines", "plan.json", "--trace", "trace.json", folder=tmp_path
    )
    assert "--device says where --engines" in refused("compare", "a", "b", "--device", "cpu", folder=tmp_path)
