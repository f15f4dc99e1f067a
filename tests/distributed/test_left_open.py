"""A user's own script that ends without closing its Pipeline."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")

from run_plans import ROOT, small_plan

from bapipe.records.plan import write_plan
from bapipe.torch.launch.local_ranks import run_local, shared_folder

HERE = Path(__file__).resolve().parent


def test_a_script_that_never_closes_its_pipeline_leaves_no_group_behind(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of gloo that outlive the interpreter could abort the process."""
    monkeypatch.chdir(ROOT)
    write_plan(small_plan("1f1b-so", stages=2), tmp_path / "plan.json")
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    program = [str(HERE / "own_loop.py"), str(tmp_path / "plan.json"), str(tmp_path)]
    with shared_folder() as folder:
        ended = run_local(2, [*program, "--steps", "2", "--leave-open"], folder, environment)
    assert [end.code for end in ended.ranks] == [0, 0], capfd.readouterr().err
    assert [(tmp_path / f"group-{rank}").read_text() for rank in range(2)] == ["False", "False"]
