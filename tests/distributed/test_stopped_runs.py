"""Runs that are stopped from outside: no process stays, and one that saves itself has saved its last step."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")

from elastic_runs import COMMAND, descendants, ranks_of, states, tiny_plan  # noqa: E402
from run_plans import ROOT, small_plan  # noqa: E402

from bapipe.records.plan import write_plan  # noqa: E402
from bapipe.torch.checkpoint.checkpoint_folder import latest, read_manifest  # noqa: E402

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="finding the processes of a run needs /proc")

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
STARTS = 240.0
"""seconds in which a run begins to train, however busy the machine is"""
ENDS = 120.0
"""seconds after which what is left of a run stays for good"""


def processes_with(text: str) -> list[int]:
    """Processes that live and have this in their command."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit() and int(path.name) != os.getpid():
            with contextlib.suppress(OSError):
                state = (path / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
                command = (path / "cmdline").read_bytes().decode(errors="replace")
                if state not in "ZX" and text in command:
                    found.append(int(path.name))
    return found


class Run:
    """A command under way, every process of which has the folder in its command."""

    def __init__(self, folder: Path, *command: str, **environment: str) -> None:
        self.folder, self.output = folder, folder / "output"
        with self.output.open("w") as stream:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**ENVIRONMENT, **environment},
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def left(self) -> list[int]:
        return processes_with(str(self.folder))

    def until(self, happened: Callable[[], object]) -> None:
        end = time.monotonic() + STARTS
        while not happened():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < end, self.output.read_text()
            time.sleep(0.01)

    def until_it_trains(self) -> None:
        self.until(lambda: "step 3 " in self.output.read_text())

    def seconds_until_gone(self) -> float:
        start = time.monotonic()
        while self.left and time.monotonic() < start + ENDS:
            self.process.poll()
            time.sleep(0.01)
        assert self.left == [], f"left after {ENDS:g} s: {self.left}\n{self.output.read_text()[-2000:]}"
        return time.monotonic() - start

    def code(self) -> int:
        return self.process.wait(timeout=ENDS)

    def end(self) -> None:
        while self.left:
            for process in self.left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.01)
        self.process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts `bapipe run` of a small plan without an end; ends all of it, come what may."""
    started: list[Run] = []

    def bapipe_run(*options: str, saved: bool = False) -> Run:
        folder = tmp_path / f"run-{len(started)}"
        folder.mkdir()
        write_plan(tiny_plan(2), folder / "plan.json")
        options = (*options, "--checkpoint", str(folder / "saved")) if saved else options
        command = [*COMMAND, str(folder / "plan.json"), "--steps", "1000000", *options]
        started.append(Run(folder, *command))
        return started[-1]

    yield bapipe_run
    for run in started:
        run.end()


@pytest.fixture
def own_loop(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts own_loop.py on two ranks by torchrun and waits until they train; ends it all, come what may."""
    started: list[Run] = []

    def torchrun(*options: str) -> Run:
        folder = tmp_path / "run"
        folder.mkdir()
        (tmp_path / "temporary").mkdir()
        write_plan(small_plan("1f1b-so", stages=2), folder / "plan.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", "2", str(HERE / "own_loop.py"), str(folder / "plan.json"), str(folder)]
        run = Run(folder, *command, *options, TMPDIR=str(tmp_path / "temporary"))
        started.append(run)
        run.until(lambda: all((folder / f"stepped-{rank}").exists() for rank in range(2)))
        return run

    yield torchrun
    for run in started:
        run.end()


def test_a_run_that_is_terminated_saves_its_last_step(start: Any) -> None:
    run = start(saved=True)
    run.until_it_trains()
    run.process.send_signal(signal.SIGTERM)
    run.seconds_until_gone()
    assert run.code() == 128 + signal.SIGTERM
    said = run.output.read_text()
    *steps, last = said.splitlines()
    found = re.fullmatch(
        r"bapipe: stopped by SIGTERM after (\d+) steps, saved as (\S+); --resume goes on there", last
    )
    assert found, said
    trained = int(found[1])
    assert steps[-1].startswith(f"step {trained - 1} ")
    assert found[2] == str(latest(run.folder / "saved"))
    assert read_manifest(found[2]).step == trained
    assert states(run.folder / "saved")


def test_no_rank_outlives_who_started_it(start: Any) -> None:
    run = start()
    run.until_it_trains()
    run.process.kill()
    run.seconds_until_gone()
    assert run.code() == -signal.SIGKILL


@pytest.mark.slow
def test_a_users_own_script_ends_with_torchrun(tmp_path: Path, own_loop: Any) -> None:
    run = own_loop()
    os.kill(run.process.pid, signal.SIGKILL)
    run.seconds_until_gone()
    said = run.output.read_text()
    # The other rank may find out by its neighbour's end.
    assert re.search(
        r"^bapipe: rank [01] ends, because torchrun, which started it, has ended$", said, re.MULTILINE
    )
    assert list((tmp_path / "temporary").glob("bapipe-rank-*")) == []


def _store(rank: int) -> Any:
    """The notes of a run, as anyone may write them who reaches the store that a rank has in its environment."""
    variables = Path(f"/proc/{rank}/environ").read_bytes().decode().split("\0")
    found = dict(item.split("=", 1) for item in variables if "=" in item)
    store = torch.distributed.TCPStore(found["MASTER_ADDR"], int(found["MASTER_PORT"]), is_master=False)
    return torch.distributed.PrefixStore("bapipe/watch/0", store)


@pytest.mark.parametrize(
    "said",
    [
        pytest.param('{"rank": 0, "by": 5, "where": "", "reason": "x", "at": 1.0, "code": 0}', id="code-0"),
        pytest.param("[[[", id="unreadable", marks=pytest.mark.slow),
    ],
)
def test_no_word_in_the_store_ends_a_run_with_success(own_loop: Any, said: str) -> None:
    run = own_loop()
    _store(int((run.folder / "pid-0").read_text())).set("failure", said)
    run.seconds_until_gone()
    assert run.code() == 1


@pytest.mark.slow
def test_what_the_store_names_is_left_alone_unless_it_is_the_runs(tmp_path: Path, own_loop: Any) -> None:
    """Rank 1 is stopped, and says in the store that it is another process, with a file of others."""
    run = own_loop("--timeout", "4")
    ranks = [int((run.folder / f"pid-{rank}").read_text()) for rank in range(2)]
    victim = tmp_path / "temporary" / "bapipe-rank-victim"
    victim.write_bytes(bytes(120))
    link = tmp_path / "temporary" / "bapipe-rank-link"
    link.symlink_to(victim)
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            started = Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[19]
            store = _store(ranks[1])
            os.kill(ranks[1], signal.SIGSTOP)
            status = {**json.loads(store.get("at/1")), "process": f"{other.pid} {started}", "said": 1.0}
            while "does not answer" not in run.output.read_text():
                for path in (victim, link):
                    with contextlib.suppress(RuntimeError):
                        store.set("at/1", json.dumps({**status, "progress": str(path)}))
                assert run.process.poll() is None, run.output.read_text()
                time.sleep(0.01)
            run.until(lambda: not Path(f"/proc/{ranks[0]}").exists() or ranks[0] not in run.left)
            assert other.poll() is None
            assert victim.exists()
            assert link.is_symlink()
        finally:
            other.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_whatever_is_sent(start: Any, number: signal.Signals, record_property: Any) -> None:
    """Five times: twice in a run that saves itself, once in one that does not, twice while it starts up."""
    seconds = []
    for turn in range(5):
        run = start(saved=turn < 2)
        if turn < 3:
            run.until_it_trains()
        elif turn == 3:
            run.until(lambda run=run: len(ranks_of(run.process.pid)) == 2)
        else:
            run.until(lambda run=run: descendants(run.process.pid))
        run.process.send_signal(number)
        seconds.append(run.seconds_until_gone())
        code = run.code()
        if number == signal.SIGKILL:
            assert code != 0, run.output.read_text()
        else:
            assert code == 128 + number, run.output.read_text()
            assert f"bapipe: stopped by {number.name}" in run.output.read_text()
    record_property("seconds until gone", seconds)
    print(f"\n{number.name}: gone after", *(f"{one:.2f}" for one in seconds), "s")
