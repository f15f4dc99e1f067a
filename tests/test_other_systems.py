"""Planning needs nothing that only Linux has; running says in one line that it does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bapipe.errors import BaPipeError
from bapipe.torch.launch import launcher
from bapipe.torch.launch.run_options import RunOptions
from paths import REPOSITORY

WITHOUT_POSIX = """
import os, signal, sys

class Missing:
    NAMES = {"fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"}

    def find_spec(self, name, path=None, target=None):
        if name in self.NAMES:
            raise ImportError(f"there is no {name} on this system")

sys.meta_path.insert(0, Missing())
for name in Missing.NAMES:
    sys.modules.pop(name, None)
for name in ("fork", "geteuid", "getuid", "getppid", "killpg", "setsid"):
    delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGUSR1", "pidfd_send_signal", "setitimer"):
    delattr(signal, name)

import importlib
import bapipe
from bapipe.cli import COMMANDS

for module, command in COMMANDS.values():
    assert getattr(importlib.import_module(module), command)
assert "torch" not in sys.modules
plan = bapipe.plan("alexnet", "2xv100", global_batch=64)
bapipe.write_plan(plan, sys.argv[1] + "/plan.json")
bapipe.write_report(bapipe.read_plan(sys.argv[1] + "/plan.json"), sys.argv[1] + "/report.html")
timeline = bapipe.simulate(bapipe.make_schedule("zb-h1", 4, 8), bapipe.Costs.of(4, forward=1, backward=2))
assert timeline.time > 0
from click.testing import CliRunner
from bapipe.cli import cli

done = CliRunner().invoke(cli, ["plan", "alexnet", "--cluster", "2xv100"], catch_exceptions=False)
assert done.exit_code == 0, done.output
"""


def test_all_of_planning_loads_and_works_without_what_only_posix_has(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_POSIX, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_a_run_elsewhere_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    runnable = launcher.check_run(REPOSITORY / "examples" / "plan.json", RunOptions())
    launcher.check_here(runnable, RunOptions())
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(BaPipeError, match="plans run on Linux, and this is darwin; take the plan"):
        launcher.check_here(runnable, RunOptions())
