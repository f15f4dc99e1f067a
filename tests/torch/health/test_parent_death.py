"""Processes that end with the one that started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bapipe.torch.health.parent_death import noted_parent, write_parent

CHILD = (
    "from bapipe.torch.health.parent_death import end_with_parent; end_with_parent({}); "
    "print('ready', flush=True); input()"
)
PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=sys.stdin)
input()
"""


def test_ranks_are_told_the_number_of_their_launcher(tmp_path: Path) -> None:
    assert noted_parent(["worker", "plan.json"]) is None
    assert noted_parent(["worker", "--notes"]) is None
    assert noted_parent(["worker", "--notes", str(tmp_path), "--json"]) == 0, "the launcher has removed its folder"
    write_parent(1234, tmp_path)
    assert noted_parent(["worker", "--notes", str(tmp_path), "--json"]) == 1234


def test_a_process_whose_parent_is_another_ends_at_once() -> None:
    for parent, code in ((os.getpid(), 0), (os.getpid() + 1, 1), (0, 1), (None, 0)):
        done = subprocess.run(
            [sys.executable, "-c", CHILD.format(parent)], input="\n", capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (code, "" if code else "ready\n")


@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_ends_with_its_parent_even_if_it_is_stopped(stopped: bool) -> None:
    """Its end of the pipe, the last one, is closed when it has ended."""
    if stopped and sys.platform != "linux":
        pytest.skip("only Linux ends a process that is stopped")
    code = CHILD.format("") if not stopped else CHILD.format("").replace("input()", "os.kill(os.getpid(), 19)")
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, f"import os; {code}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        parent.send_signal(signal.SIGKILL)
        assert parent.stdout.read() == ""
        assert parent.wait() == -signal.SIGKILL
