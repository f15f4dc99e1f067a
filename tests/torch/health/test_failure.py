"""The one line of a run that failed, and who waits for whom."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bapipe.io.files import dump_json
from bapipe.schedule.actions import Action
from bapipe.torch.health.failure import (
    Failure,
    explain,
    forget_notes,
    parse_failure,
    read_failures,
    write_failure,
    write_finished,
)
from bapipe.torch.health.rank_end import RankEnd
from bapipe.torch.health.rank_status import (
    Progress,
    Status,
    culprit,
    located,
    parse_status,
    progress_file,
    read_progress,
    status_table,
)

NOW = 1000.0
KILLED = (
    RankEnd(rank=1, code=-9, at=5.0),
    RankEnd(rank=0, code=1, at=6.0, said="gone"),
    RankEnd(rank=2, code=-15, at=7.0, told=True),
)
FINE = tuple(RankEnd(rank=rank, code=0, at=4e9) for rank in range(3))
FAILED = tuple(RankEnd(rank=rank, code=1, at=9.0) for rank in range(3))
AT = "rank 1 on here, stage 1, action 1F2 of step 7"


def _explained(folder: Path, ends: Sequence[RankEnd] = FAILED) -> tuple[str, int]:
    failure = explain(folder, stages=((0,), (1,), (2, 5)), host="here", ends=ends)
    assert failure is not None
    return failure.line, failure.code


def _leave(folder: Path, by: int, reason: str, *, lost: bool = False, where: str = AT, **more: object) -> None:
    values = {"rank": 1, "by": by, "where": where, "reason": reason, "lost": lost, "at": float(by), **more}
    write_failure(Failure(**values), folder, by=by)  # type: ignore[arg-type]


def test_a_killed_rank_is_named_with_its_signal(tmp_path: Path) -> None:
    _leave(tmp_path, 2, "has ended", lost=True)
    _leave(tmp_path, 0, "has ended; rank 0 noticed at action 0B1 of step 7", lost=True)
    assert _explained(tmp_path, KILLED) == (f"{AT}: was killed by SIGKILL; rank 0 noticed", 1)


def test_a_rank_that_was_ended_because_it_did_not_answer_was_not_killed(tmp_path: Path) -> None:
    _leave(tmp_path, 0, "does not answer; rank 0 waited 3 s", lost=True, table="rank …")
    assert _explained(tmp_path, KILLED) == (f"{AT}: does not answer; rank 0 waited 3 s", 1)


def test_the_rank_that_failed_of_itself_comes_before_those_that_lost_it(tmp_path: Path) -> None:
    _leave(tmp_path, 0, "has ended", lost=True)
    _leave(tmp_path, 1, "ValueError: broke (model.py:3)")
    assert _explained(tmp_path, KILLED) == (f"{AT}: ValueError: broke (model.py:3)", 1)
    assert [failure.by for failure in read_failures(tmp_path, ranks=3)] == [0, 1]


def test_a_rank_that_was_killed_before_comes_before_one_that_failed_of_itself(tmp_path: Path) -> None:
    _leave(tmp_path, 0, "RuntimeError: Connection closed by peer", where="rank 0", rank=0, at=5.5)
    expected = "rank 1 on here, stage 1, starting up: was killed by SIGKILL"
    assert _explained(tmp_path, KILLED) == (expected, 1)


def test_who_noticed_may_not_know_which_rank_it_was(tmp_path: Path) -> None:
    """Rank 1 is killed before the others have heard of it."""
    where = "rank 0 on here, stage 0, connecting to 2 other ranks"
    _leave(tmp_path, 0, "another rank has ended or cannot be reached", where=where, rank=0, lost=True, at=5.5)
    found = explain(tmp_path, stages=((0,), (1,), (2, 5)), host="here", ends=KILLED)
    assert found is not None
    assert found.line == "rank 1 on here, stage 1, starting up: was killed by SIGKILL"
    assert (found.rank, found.lost) == (1, True)


def test_what_concerns_no_single_rank_stands_alone(tmp_path: Path) -> None:
    for rank in range(3):
        _leave(tmp_path, rank, "no such model; correct it", where="", code=2)
    assert _explained(tmp_path) == ("no such model; correct it", 2)


def test_a_rank_killed_unnoticed_is_known_from_the_launcher(tmp_path: Path) -> None:
    progress = Progress(progress_file(tmp_path, 1))
    progress.begin(7)
    progress.note_action(Action.parse("1F2"))
    assert _explained(tmp_path, KILLED) == (f"{AT}: was killed by SIGKILL", 1)


def test_a_rank_that_never_began_was_starting_up(tmp_path: Path) -> None:
    assert _explained(tmp_path, KILLED)[0] == "rank 1 on here, stage 1, starting up: was killed by SIGKILL"


def test_without_any_word_the_rank_that_ended_first_has_the_last(tmp_path: Path) -> None:
    said = "ModuleNotFoundError: No module named 'torch'"
    ends = (RankEnd(rank=2, code=1, at=1.0, said=said), *FAILED[:2])
    where = "rank 2 on here, stages 2 and 5, starting up"
    assert _explained(tmp_path, ends) == (f"{where}: ended with code 1: {said}", 1)
    assert _explained(tmp_path)[0] == "rank 0 on here, stage 0, starting up: ended with code 1"
    told = tuple(replace(end, code=-15, told=True) for end in FAILED)
    assert _explained(tmp_path, told)[0].endswith("was killed by SIGTERM")


def test_ranks_that_were_all_stopped_are_all_named(tmp_path: Path) -> None:
    ends = tuple(RankEnd(rank=rank, code=-9, at=1.0, told=True, stopped=8.2) for rank in range(2))
    line, code = _explained(tmp_path, (*ends, replace(FINE[2], code=1, told=True)))
    expected = "rank 0 on here, stage 0, starting up: was stopped by a signal for 8 s, as was rank 1"
    assert (line, code) == (expected, 1)


EARLY = "ended before it had finished, with code 0"
UNREADABLE = "a rank failed, and what it said of it cannot be read"


@pytest.mark.parametrize("code", [0, -1, 256, True, False, None, "0", 1.0, [], 2**70])
def test_a_failure_never_has_the_code_of_success(tmp_path: Path, code: object) -> None:
    said = {"rank": 1, "by": 0, "where": AT, "reason": "broke", "at": 1.0, "code": code}
    for given in (said, json.dumps(said)):
        found = parse_failure(given, ranks=3)
        assert (found.line, found.code) == (f"{AT}: broke", 1)
    assert Failure(rank=0, by=0, where="", reason="", at=0.0, code=code).code == 1  # type: ignore[arg-type]
    (tmp_path / "failure-0.json").write_text(json.dumps(said))
    assert _explained(tmp_path, FINE) == (f"{AT}: broke", 1)


@pytest.mark.parametrize(
    "said", ["", "[", "null", "0", "{}", "[" * 100_000, '{"rank": "x"}', "\0", '{"code": 0}', "NaN"]
)
def test_a_failure_that_cannot_be_read_is_one(tmp_path: Path, said: str) -> None:
    assert (parse_failure(said, ranks=3).line, parse_failure(said, ranks=3).code) == (UNREADABLE, 1)
    (tmp_path / "failure-0.json").write_text(said)
    assert _explained(tmp_path, FINE) == (UNREADABLE, 1)


@pytest.mark.parametrize("rank", [-1, 3, 10**30])
def test_a_rank_that_the_run_does_not_have_is_not_lost(rank: int) -> None:
    said = {"rank": rank, "by": 0, "where": AT, "reason": "broke", "at": 1.0, "lost": True}
    found = parse_failure(said, ranks=3)
    assert (found.rank, found.lost, found.code) == (0, False, 1)


def test_only_ranks_that_have_all_finished_are_success(tmp_path: Path) -> None:
    stages = ((0,), (1,))
    for rank in range(2):
        line, code = _explained(tmp_path, FINE)
        assert (line, code) == (f"rank {rank} on here, stage {rank}, starting up: {EARLY}", 1)
        write_finished(tmp_path, by=rank)
    assert explain(tmp_path, stages=stages, host="here", ends=FINE[:2]) is None
    _leave(tmp_path, 1, "broke")
    assert _explained(tmp_path, FINE) == (f"{AT}: broke", 1)
    forget_notes(tmp_path, by=1)
    assert _explained(tmp_path, FINE)[0].endswith(EARLY)


def test_progress_outlives_a_process_that_is_killed(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pathlib import Path
from bapipe.schedule.actions import Action
from bapipe.torch.health.rank_status import Progress
progress = Progress(Path({str(tmp_path / "progress")!r}))
progress.begin(3)
progress.note_action(Action.parse("12B345"))
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    known = read_progress(tmp_path / "progress")
    assert known is not None
    assert known[:2] == ("action 12B345 of step 3", 12)
    assert read_progress(tmp_path / "no-such-file") is None
    (tmp_path / "link").symlink_to(tmp_path / "progress")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "larger").write_bytes(bytes(121))
    (tmp_path / "no-action").write_bytes(b"\xff" * 120)
    for name in ("link", "pipe", "larger", "no-action", "", "\0"):
        assert read_progress(Path(f"{tmp_path}/{name}")) is None, name


def test_progress_is_what_was_noted_last() -> None:
    progress = Progress(None)
    assert progress.current[0] == "starting up"
    progress.begin(2)
    assert progress.current[:2] == ("before step 2", None)
    progress.note_action(Action.parse("1U"))
    assert progress.current[:2] == ("action 1U of step 2", 1)
    progress.step = 3  # PipeDream's goes on without a pause
    assert progress.current[0] == "action 1U of step 3"
    progress.note("a very long note " * 20)
    assert progress.current[0].startswith("a very long note a very")


def _status(rank: int, *, waits_rank: int | None = None, said: float = NOW, waits: str = "") -> Status:
    return Status(
        rank=rank,
        host=f"host{rank}",
        machine="m",
        process="1 1",
        stages=(rank, rank + 4),
        at=f"action {rank}F1 of step 3",
        stage=rank,
        waits=waits or ("" if waits_rank is None else f"rank {waits_rank} ({waits_rank}F1)"),
        waits_rank=waits_rank,
        since=NOW - 3,
        said=said,
    )


@pytest.mark.parametrize(
    ("waits", "silent", "start", "expected"),
    [
        ({0: 1, 1: 2, 2: 3}, (), 1, 3),
        ({0: 1, 1: 2, 2: 3, 3: 2}, (3,), 1, 3),
        ({0: 1, 1: 2, 2: 1, 3: 2}, (), 1, 2),
        ({0: 1, 2: 1, 3: 2}, (), 1, 1),
        ({0: 1, 1: 2, 2: 3}, (), None, 3),
        ({0: 1, 1: 2, 2: 3}, (1,), None, 1),
        ({0: 1, 1: 2}, (), None, None),
    ],
    ids=["chain", "silent-one", "circle", "itself", "only-idle", "only-silent", "nobody-knows"],
)
def test_who_waits_for_whom_leads_to_the_culprit(
    waits: dict[int, int], silent: tuple[int, ...], start: int | None, expected: int | None
) -> None:
    statuses = {
        rank: _status(rank, waits_rank=waits.get(rank), said=NOW - 30 if rank in silent else NOW)
        for rank in range(4)
    }
    assert culprit(statuses, start, now=NOW) == expected


@pytest.mark.parametrize(("silent", "expected"), [((3,), 3), ((), 3), ((2, 3), 1)])
def test_a_rank_that_waits_for_all_is_not_the_culprit(silent: tuple[int, ...], expected: int) -> None:
    """Rank 0 has the sum and waits for rank 1 in the next step, which still waits for rank 3's part of the sum."""
    statuses = {
        0: _status(0, waits_rank=1),
        **{rank: _status(rank, waits="all ranks (summing the loss)") for rank in (1, 2)},
        3: _status(3),
    }
    for rank in silent:
        statuses[rank] = replace(statuses[rank], said=NOW - 30)
    assert culprit(statuses, 1, now=NOW) == expected


def test_a_status_is_of_the_rank_that_it_is_found_under() -> None:
    said = dump_json(_status(1, waits_rank=0))
    assert parse_status(said, 1, ranks=2) == _status(1, waits_rank=0)
    assert parse_status(said, 0, ranks=2) is None
    assert parse_status(dump_json(_status(1, waits_rank=-9)), 1, ranks=2) is None
    for wrong in ("", "[", "7", "{}", "[" * 100_000):
        assert parse_status(wrong, 1, ranks=2) is None


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/notes/progress-1", True),
        ("/notes/progress-2", False),
        ("/notes/bapipe-rank-1-1-abc", True),
        ("/notes/bapipe-rank-1-2-abc", False),
        ("/notes/bapipe-rank-victim", False),
        ("/notes/bapipe-rank-1-1-/../passwords", False),
        ("/notes/../notes/progress-1", False),
        ("/other/progress-1", False),
        ("progress-1", False),
        ("", False),
    ],
)
def test_a_file_is_known_by_the_place_and_the_name_that_the_run_gives_it(path: str, expected: bool) -> None:
    pytest.importorskip("torch", reason="ranks run with torch")
    from bapipe.torch.health.process_exit import is_file_of

    status = replace(_status(1), progress=path)
    assert is_file_of(status, Path("/notes/progress-0")) is expected
    assert not is_file_of(status, None)


def test_the_table_says_what_every_rank_waits_for() -> None:
    statuses = {0: _status(0, waits_rank=1), 1: _status(1, said=NOW - 3), 2: _status(2, waits="all ranks (loss)")}
    assert status_table(statuses, now=NOW).splitlines() == [
        "rank  stage  host   at                    waits for         for  heard",
        "0     0,4    host0  action 0F1 of step 3  rank 1 (1F1)      3 s  now",
        "1     1,5    host1  action 1F1 of step 3  not known         3 s  3 s ago",
        "2     2,6    host2  action 2F1 of step 3  all ranks (loss)  3 s  now",
    ]


def test_a_rank_between_actions_is_located_by_all_its_stages() -> None:
    assert located(_status(1), 1) == "rank 1 on host1, stage 1, action 1F1 of step 3"
    assert located(None, 1, stages=(1, 5)) == "rank 1, stages 1 and 5"


def test_a_failure_is_one_json_object(tmp_path: Path) -> None:
    _leave(tmp_path, 3, "broke")
    assert json.loads((tmp_path / "failure-3.json").read_text())["reason"] == "broke"


def test_launching_and_comparing_need_no_torch() -> None:
    launching = "bapipe.torch.launch.launcher, bapipe.torch.launch.node_commands"
    modules = f"bapipe.analysis.predicted_measured, {launching}, bapipe.cli.launch, bapipe.cli.run"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
