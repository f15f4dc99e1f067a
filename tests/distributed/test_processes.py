"""Processes of this machine, and SIGTERM while a call blocks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

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
        end_process(f"{child.pid} {int(start) + 1}")
        assert not has_ended(name), "another process was meant"
        end_process(name)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert has_ended(name)


CODE = """
import os, signal, sys, threading, time
from bapipe.torch.health.processes import on_termination

def stop():
    print("told", flush=True)
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
        assert process.stdout.readline() == "told\n"
        assert process.wait(timeout=60) == 7
