"""The one line of a run that failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bapipe.torch.failure import Failure, Progress, explain, write_failure

SUMMARY = """\
E1115 03:16:48.309000 8779 api.py:1002] failed (exitcode: 1) local_rank: 0 (pid: 8783) of binary: python
Failures:
[1]:
  time      : 2026-11-15_03:16:48
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 8784)  (SIGKILL)
  error_file: <N/A>
[2]:
  rank      : 2 (local_rank: 2)
  exitcode  : -15 (pid: 8785)  (SIGTERM)
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 8783)
============================================================
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three ranks at work."""
    for rank, action in enumerate(("0B1", "1F2", "2F2")):
        progress = Progress(tmp_path, rank)
        progress.begin(7)
        progress.note(f"action {action} of step {progress.step}")
    return tmp_path


def _explained(folder: Path, summary: str = "") -> tuple[str, int]:
    return explain(folder, stages=(0, 1, 2), summary=summary, code=1)


def test_a_killed_rank_is_named_with_its_action(folder: Path) -> None:
    write_failure(Failure(rank=2, reason="rank 1 has ended", lost=True, lost_rank=1, at=2.0), folder)
    write_failure(Failure(rank=0, reason="rank 1 has ended", lost=True, lost_rank=1, at=1.0), folder)
    at = "rank 1, stage 1, action 1F2 of step 7"
    noticed = "rank 0 noticed at action 0B1 of step 7"
    assert _explained(folder, SUMMARY) == (f"{at}: was killed by SIGKILL; {noticed}", 1)
    assert _explained(folder) == (f"{at}: has ended; {noticed}", 1)


def test_the_rank_that_failed_of_itself_comes_before_those_that_lost_it(folder: Path) -> None:
    write_failure(Failure(rank=0, reason="rank 1 has ended", lost=True, lost_rank=1, at=1.0), folder)
    write_failure(Failure(rank=1, reason="ValueError: broke (model.py:3)", at=2.0), folder)
    line = "rank 1, stage 1, action 1F2 of step 7: ValueError: broke (model.py:3)"
    assert _explained(folder, SUMMARY) == (line, 1)


def test_what_concerns_no_single_rank_stands_alone(folder: Path) -> None:
    for rank in range(3):
        write_failure(Failure(rank=rank, reason="no such model; correct it", whole=True, code=2, at=1.0), folder)
    assert _explained(folder) == ("no such model; correct it", 2)


def test_a_rank_killed_unnoticed_is_known_from_torchrun(folder: Path) -> None:
    line = "rank 1, stage 1, action 1F2 of step 7: was killed by SIGKILL"
    assert _explained(folder, SUMMARY) == (line, 1)
    write_failure(Failure(rank=0, reason="another rank has ended", lost=True, at=1.0), folder)
    assert _explained(folder, SUMMARY) == (line, 1)


def test_a_rank_that_lost_an_unknown_one_says_so(folder: Path) -> None:
    write_failure(Failure(rank=2, reason="another rank did not answer in time", lost=True, at=1.0), folder)
    assert _explained(folder) == ("rank 2, stage 2, action 2F2 of step 7: another rank did not answer in time", 1)


def test_without_any_word_torchrun_has_the_last(tmp_path: Path) -> None:
    assert _explained(tmp_path, "first\nNo module named torch\n") == (
        "torchrun ended with code 1: No module named torch",
        1,
    )
    assert _explained(tmp_path) == ("torchrun ended with code 1: it said nothing", 1)


def test_a_rank_that_never_began_was_starting_up(tmp_path: Path) -> None:
    assert _explained(tmp_path, SUMMARY)[0] == "rank 1, stage 1, starting up: was killed by SIGKILL"


def test_progress_without_a_folder_is_only_remembered() -> None:
    progress = Progress(None, 0)
    assert progress.current == "starting up"
    progress.begin(2)
    assert progress.current == "before step 2"


def test_launching_and_comparing_need_no_torch() -> None:
    code = "import sys, bapipe.compare, bapipe.torch.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
