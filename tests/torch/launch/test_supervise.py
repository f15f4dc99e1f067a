"""Ranks under their launcher: signals, ranks that fail, ranks that are stopped. They run small programs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bapipe.torch.health.rank_end import RankEnd
from bapipe.torch.launch.local_ranks import run_local, shared_folder
from bapipe.torch.launch.supervise import Ended, supervise

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are looked up in /proc")

WAIT = "import threading; threading.Event().wait()"
DEAF = f"import os, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.write(1, b'deaf\\n'); {WAIT}"
LAUNCHER = """
import json, os, sys
from bapipe.torch.launch.supervise import supervise
ended = supervise([((sys.executable, "-c", code), os.environ) for code in json.loads(sys.argv[1])])
codes = {end.rank: end.code for end in ended.ranks}
print(json.dumps([codes, ended.stopped_by, ended.killed]), flush=True)
"""


def _supervised(*programs: str, **options: Any) -> Ended:
    return supervise([((sys.executable, "-c", program), os.environ) for program in programs], **options)


def _ends_within(seconds: float, process: int) -> bool:
    state, until = Path(f"/proc/{process}/stat"), time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(OSError):
            if state.read_text().rpartition(")")[2].split()[0] not in "ZX":
                time.sleep(0.02)
                continue
        return True
    return False


def test_ranks_that_end_well_are_all_there_is() -> None:
    ended = _supervised("", "")
    assert sorted((end.rank, end.code, end.told) for end in ended.ranks) == [(0, 0, False), (1, 0, False)]
    assert (ended.failed, ended.stopped_by, ended.killed) == ((), None, False)


def test_a_rank_that_fails_ends_the_others_and_comes_first(capfd: pytest.CaptureFixture[str]) -> None:
    broke = "import sys; print('it broke', file=sys.stderr); sys.exit(3)"
    first, second = _supervised(WAIT, broke).ranks
    assert (first.rank, first.code, first.told, first.said, first.killed_by) == (1, 3, False, "it broke", "")
    assert (second.rank, second.code, second.told, second.killed_by) == (0, -signal.SIGTERM, True, "")
    assert "rank 1: it broke\n" in capfd.readouterr().err


def test_a_rank_that_is_killed_is_told_from_one_that_was_told_to_end() -> None:
    first, second = _supervised("import os; os.kill(os.getpid(), 11)", WAIT).ranks
    assert (first.rank, first.killed_by) == (0, "SIGSEGV")
    assert (second.rank, second.killed_by) == (1, "")


def test_what_a_failed_rank_has_started_ends_with_it() -> None:
    start = f"child = subprocess.Popen([sys.executable, '-c', {WAIT!r}])"
    ended = _supervised(f"import subprocess, sys; {start}; print(child.pid, file=sys.stderr); sys.exit(5)")
    # It was killed, and ends as soon as a core has time for it.
    assert _ends_within(60, int(ended.ranks[0].said))


@pytest.mark.parametrize("others", [1, 2])
def test_stopped_ranks_do_not_outlive_one_that_failed(tmp_path: Path, others: int) -> None:
    """They hear no SIGTERM. One that fails does so when they are stopped."""
    mark = f"(pathlib.Path({str(tmp_path)!r}) / str(os.getpid())).touch()"
    stopped = f"import os, pathlib; {mark}; os.kill(os.getpid(), 19)"
    fails = f"""
import pathlib, time
def stopped(process):
    return pathlib.Path(f"/proc/{{process}}/stat").read_text().rpartition(")")[2].split()[0] == "T"
folder = pathlib.Path({str(tmp_path)!r})
while sum(stopped(file.name) for file in folder.iterdir()) < {others}:
    time.sleep(0.01)
raise SystemExit(1)
"""
    ended = _supervised(*[stopped] * others, fails)
    assert [end.rank for end in ended.failed if not end.told] == [others]
    assert sorted(end.code for end in ended.ranks) == [-signal.SIGKILL] * others + [1]


def test_ranks_that_are_all_stopped_are_ended_after_the_patience_and_said_to_be() -> None:
    ended = _supervised(*["import os; os.kill(os.getpid(), 19)"] * 2, patience=0.1)
    assert all(end.stopped > 0 and end.code == -signal.SIGKILL for end in ended.ranks)
    assert [end.killed_by for end in ended.ranks] == ["", ""]


@contextlib.contextmanager
def _launched(*programs: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", LAUNCHER, json.dumps(programs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_is_passed_on(number: signal.Signals) -> None:
    ready = f"import os; os.write(1, b'ready\\n'); {WAIT}"
    with _launched(ready, ready) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        process.send_signal(number)
        codes, stopped_by, killed = json.loads(process.stdout.readline())
    # Python itself ends by the signal's own default after a KeyboardInterrupt.
    assert (codes, stopped_by, killed) == ({"0": -number, "1": -number}, number, False)


def test_where_ranks_were_at_ctrl_c_is_not_shown() -> None:
    ready = f"import os; os.write(1, b'ready\\n'); {WAIT}"
    command = [sys.executable, "-c", LAUNCHER, json.dumps([ready, ready])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert said == ""  # each rank has written the traceback of a KeyboardInterrupt


def test_where_sigchld_is_ignored_ends_are_noticed_without_their_codes() -> None:
    code = "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n" + LAUNCHER
    command = [sys.executable, "-c", code, json.dumps(["", "raise SystemExit(3)"])]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=120, check=True)
    assert json.loads(done.stdout) == [{"0": 0, "1": 0}, None, False]


def test_a_second_signal_kills_at_once() -> None:
    with _launched(DEAF, DEAF) as process:
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == ["deaf\n"] * 2
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)  # the same, as `timeout` sends it
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)
        process.send_signal(signal.SIGTERM)
        assert json.loads(process.stdout.readline()) == [{"0": -9, "1": -9}, signal.SIGTERM, True]


def test_what_has_not_ended_in_time_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "0.5")
    ready = str(tmp_path / "ready")
    deaf_ready = DEAF.replace("os.write(1, b'deaf\\n')", f"os.mkdir({ready!r})")
    fails = f"import os, time\nwhile not os.path.exists({ready!r}):\n    time.sleep(0.01)\nraise SystemExit(1)"
    deaf, failed = _supervised(deaf_ready, fails).ranks[::-1]
    assert (deaf.rank, deaf.code, deaf.told) == (0, -signal.SIGKILL, True)
    assert (failed.rank, failed.code) == (1, 1)


def test_ranks_are_started_from_any_thread() -> None:
    found: list[Ended] = []
    thread = threading.Thread(target=lambda: found.append(_supervised("", "")))
    thread.start()
    thread.join()
    assert len(found[0].ranks) == 2


def test_ranks_find_each_other_as_under_torchrun(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT")
    script = tmp_path / "script.py"
    script.write_text(
        f"import json, os, sys; out = open(sys.argv[1] + os.environ['RANK'], 'w')\n"
        f"json.dump([os.environ[name] for name in {names!r}], out)"
    )
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth7", "RANK": "9"}
    with shared_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700
        ended = run_local(2, [str(script), str(tmp_path / "out-")], folder, environment)
    assert ended.failed == ()
    for rank in range(2):
        own = str(rank)
        assert json.loads((tmp_path / f"out-{rank}").read_text()) == [own, own, "2", "2", "127.0.0.1", "0"]


def test_an_end_knows_its_signal() -> None:
    assert RankEnd(rank=0, code=-9, at=1.0).killed_by == "SIGKILL"
    assert RankEnd(rank=0, code=-9, at=1.0, told=True).killed_by == ""
    assert RankEnd(rank=0, code=3, at=1.0).killed_by == ""
