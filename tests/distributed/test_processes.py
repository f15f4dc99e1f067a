"""Processes of this machine, and SIGTERM while a call blocks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="running a plan needs torch: pip install bapipe[torch]")

from bapipe.torch.health.processes import end_process, has_ended, own_machine, own_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")


def test_a_process_is_known_by_its_number_and_its_start() -> None:
    own = own_process()
    assert not has_ended(own)
    number, start = own.split()
    assert has_ended(f"{number} {int(start) - 1}"), "one that had this number before"
    assert own_machine() == own_machine() != ""


def test_one_that_nobody_has_waited_for_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        with open(f"/proc/{child.pid}/stat", encoding="utf-8") as file:
            start = file.read().rpartition(")")[2].split()[19]
        name = f"{child.pid} {start}"
        assert not has_ended(name)
        assert not end_process(name), "it is of no run"
        assert not has_ended(name)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(name)


RUN = {"TORCHELASTIC_RUN_ID": "a", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
ASK = """
import json, sys
from bapipe.torch.health.processes import end_process
print(json.dumps([end_process(name) for name in json.loads(sys.argv[1])]))
"""
ORPHANAGE = """
import subprocess
print(subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL).pid, flush=True)
input()
"""


def _name(process: int) -> str:
    return f"{process} {Path(f'/proc/{process}/stat').read_text().rpartition(')')[2].split()[19]}"


def _ended(names: list[str]) -> list[bool]:
    """Which of the processes of these names a rank of the run ends."""
    command = [sys.executable, "-c", ASK, json.dumps(names)]
    done = subprocess.run(command, env={**os.environ, **RUN}, check=True, stdout=subprocess.PIPE)
    found: list[bool] = json.loads(done.stdout)
    return found


def test_only_a_rank_of_the_run_is_ended() -> None:
    path = {"PATH": os.environ["PATH"]}
    others = [{}, {**RUN, "TORCHELASTIC_RUN_ID": "b"}, {**RUN, "MASTER_PORT": "2"}]
    with contextlib.ExitStack() as stack:
        started = []
        for environment in (RUN, *others):
            process = stack.enter_context(subprocess.Popen(["sleep", "600"], env={**path, **environment}))
            stack.callback(process.kill)
            started.append(process)
        rank = _name(started[0].pid)
        wrong = [f"{started[0].pid} 1", f"{started[0].pid}", f"{started[0].pid} ", f"-{rank}", f" {rank}"]
        wrong += ["-1 1", "0 0", "", "1 x", f"{2**70} 1", _name(os.getpid()), *(_name(p.pid) for p in started[1:])]
        assert _ended([*wrong, rank]) == [*[False] * len(wrong), True]
        assert started[0].wait() == -signal.SIGKILL
        assert [process.poll() for process in started[1:]] == [None] * len(others)


def test_a_rank_that_another_process_has_started_is_left_alone() -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", ORPHANAGE], env={**os.environ, **RUN}, **pipes) as parent:  # type: ignore[call-overload]
        child = int(parent.stdout.readline())
        try:
            assert _ended([_name(child)]) == [False]
            assert not has_ended(_name(child))
        finally:
            os.kill(child, signal.SIGKILL)
            parent.communicate(b"\n")


CODE = """
import os, signal, sys, threading, time
from bapipe.torch.health.processes import on_termination

def stop(number):
    print("told", number, flush=True)
    os._exit(7)

assert on_termination(stop)
assert not on_termination(stop)
child = os.fork()
if child == 0:
    time.sleep(600)
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
print("ready", flush=True)
threading.Event().wait()
"""


def test_sigterm_is_heard_while_the_main_thread_waits_and_children_end_by_it() -> None:
    with subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "told 15\n"
        assert process.wait(timeout=60) == 7
