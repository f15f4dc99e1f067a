"""The campaigns of benchmarks/reliability: what they run, and how they judge it; a small part of each for real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")

from paths import REPOSITORY

FOLDER = REPOSITORY / "benchmarks" / "reliability"
sys.path.insert(0, str(FOLDER))

from fault_cases import SCHEDULES, STEPS, Fault, all_faults, make_plan  # noqa: E402
from fault_run import Command, judged_problems  # noqa: E402
from soak import judged  # noqa: E402

from bapipe.torch.runtime.plan_checks import check_plan  # noqa: E402

LOSSES = {step: 1.0 / (step + 1) for step in range(STEPS)}


def test_the_matrix_has_every_fault_under_every_schedule() -> None:
    faults = all_faults(["gloo"], seed=0)
    assert len({fault.name for fault in faults}) == len(faults) > 120
    assert faults == all_faults(["gloo"], seed=0)
    for schedule in SCHEDULES:
        pairs = {(fault.how, fault.place) for fault in faults if fault.schedule == schedule}
        places = ("F", "B", "loss", "optimizer", *(("save", "resume") if schedule != "pipedream" else ()))
        assert {(how, place) for how in ("kill", "stop", "slow") for place in places} <= pairs
        for device, sliced in (("cpu", False), ("cuda", True)):
            check_plan(make_plan(schedule, device=device, sliced=sliced))


def command(**changes: Any) -> Command:
    """As a run whose rank 1 was killed should end."""
    said = [(1.0, "bapipe: rank 1 on here, stage 1, action 1F0 of step 3: was killed by SIGKILL; rank 0 noticed")]
    return Command(**{"code": 1, "ended": 1.0, "losses": [(step, LOSSES[step]) for step in range(3)], "said": said,
                      **changes})  # fmt: skip


RESUMED = Command(code=0, losses=[(step, LOSSES[step]) for step in range(2, STEPS)])


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        (command(), RESUMED, None),
        (command(code=None), RESUMED, "hangs"),
        (command(code=0), RESUMED, "code 0 instead of 1"),
        (command(ended=90.0), RESUMED, "ended 90.0 s after the fault, over 20 s"),
        (command(said=[(1.0, "bapipe: rank 0 on here: was killed by SIGKILL")]), RESUMED, "1 lines, and none or"),
        (command(said=[*command().said, (1.0, "Traceback (most recent call last):")]), RESUMED, "a traceback"),
        (command(left_processes=["python"]), RESUMED, "process left: python"),
        (command(left_files=["bapipe-rank-1"]), RESUMED, "file left: bapipe-rank-1"),
        (command(), Command(code=0, losses=[(2, 0.5)]), "resumed: other losses at steps [2]"),
        (command(), Command(code=0, losses=[(5, LOSSES[5])]), "losses of steps [0, 1, 2, 5] only"),
    ],
)
def test_what_does_not_hold_is_said(first: Command, second: Command, problem: str | None) -> None:
    fault = Fault(schedule="gpipe", transport="gloo", how="kill", place="F", ranks=(1,))
    found = list(judged_problems(fault, first, second, LOSSES, fired=[0.0], unfinished=[]))
    assert found == [] if problem is None else any(text.startswith(problem) for text in found)


def test_a_soak_in_which_something_grows_is_not_flat() -> None:
    flat = [{"step": step, "resident": 10**8, "descriptors": 20, "threads": 9} for step in range(100)]
    ranks = [{"rank": 0, "parts": [flat], "losses": [1.0, 0.5], "alone": [1.0, 0.5]}]
    assert judged(ranks)[1] == []
    assert judged([{**ranks[0], "parts": [flat[:5]]}])[1] == ["rank 0: no call is long enough to be judged"]
    grown = [
        {**row, "resident": 10**8 + 10**5 * row["step"], "descriptors": 20 + row["step"] // 10} for row in flat
    ]
    assert judged([{**ranks[0], "parts": [flat, grown]}])[1] == [
        "rank 0: resident grew by 6e+06",
        "rank 0: descriptors grew by 6",
    ]
    assert judged([{**ranks[0], "losses": [1.0, 0.5000001]}])[1] == ["a loss differs from one process by 2.0e-07"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "only", ["1f1b-sno-gloo-kill-B", "zb-h1-gloo-raise-loss", "data-parallel-gloo-stop-F-rank"]
)
def test_a_fault_of_the_matrix_for_real(tmp_path: Path, only: str) -> None:
    arguments = [str(FOLDER / "faults.py"), "--only", only, "--limit", "1", "--out", str(tmp_path / "result.json")]
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert (result["faults"], result["held"]) == (1, 1)


@pytest.mark.slow
def test_a_short_soak(tmp_path: Path) -> None:
    """In two calls: the second goes on where the first was ended."""
    arguments = [str(FOLDER / "soak.py"), "--steps", "300", "--work", str(tmp_path / "work")]
    arguments += ["--out", str(tmp_path / "result.json")]
    for seconds in ("0", "600"):
        done = subprocess.run(
            [sys.executable, *arguments, "--seconds", seconds],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert (tmp_path / "result.json").exists() == (seconds != "0")
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert (result["losses_equal_to_the_bit"], result["calls"]) == (300, 2)
