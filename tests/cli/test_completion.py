"""Shell completion: what each shell is given, and the words that it is offered."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete, ShellComplete

from bapipe.cli import cli

BAPIPE = str(Path(sys.executable).with_name("bapipe"))


def offered(*words: str) -> list[tuple[str, str]]:
    """(kind, word) for the last of the words, which is being typed."""
    shell: ShellComplete = BashComplete(cli, {}, "bapipe", "_BAPIPE_COMPLETE")
    return [(item.type, str(item.value)) for item in shell.get_completions(list(words[:-1]), words[-1])]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell(shell: str) -> None:
    variables = {"_BAPIPE_COMPLETE": f"{shell}_source", "PATH": str(Path(sys.executable).parent)}
    if shell == "bash":  # click asks bash for its version
        variables["PATH"] += ":/usr/bin:/bin"
    done = subprocess.run([BAPIPE], env=variables, capture_output=True, text=True, check=True, timeout=60)
    assert f"_BAPIPE_COMPLETE={shell}_complete" in done.stdout


def test_a_shell_is_answered() -> None:
    variables = {"_BAPIPE_COMPLETE": "bash_complete", "COMP_WORDS": "bapipe pl", "COMP_CWORD": "1"}
    done = subprocess.run([BAPIPE], env=variables, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "plain,plan\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sim"], [("plain", "simulate")]),
        (["plan", "bert-l"], [("plain", "bert-large"), ("file", "bert-l")]),
        (["plan", "x", "--sched"], [("plain", "--schedule")]),
        (["plan", "x", "--schedule", "1f1b-s"], [("plain", "1f1b-sno"), ("plain", "1f1b-so")]),
        (["plan", "x", "--cluster", "2xa100+4xrtx4"], [("plain", "2xa100+4xrtx4090")]),
        (["what-if", "x", "--cluster", "rac"], [("file", "rac")]),
        (["simulate", "v-"], [("plain", "v-half"), ("plain", "v-min"), ("file", "v-")]),
        (["checkpoint", "ver"], [("plain", "verify")]),
    ],
)
def test_what_is_offered(words: list[str], expected: list[tuple[str, str]]) -> None:
    assert offered(*words) == expected
