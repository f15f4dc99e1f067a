"""A mistake of ours ends in one line that says so, and where its traceback is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from bapipe.cli import simulate
from command import bapipe

LINE = ("simulate", "gpipe", "-n", "2", "-m", "2", "--forward", "1", "--backward", "2")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """`bapipe simulate` with a mistake in it, and the folder for temporary files."""

    def mistaken(*_: object, **__: object) -> None:
        raise IndexError("no such\nstage")

    mistaken.__code__ = mistaken.__code__.replace(co_filename=simulate.__file__)  # as if it were ours
    monkeypatch.setattr(simulate, "make_schedule", mistaken)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_one_line_names_the_file_with_the_traceback(broken: Path) -> None:
    done = bapipe(*LINE)
    assert (done.returncode, done.stdout) == (3, "")
    [line] = done.stderr.splitlines()
    assert line.startswith("bapipe: this is a bug in BaPipe, not in what you gave: IndexError: no such stage; ")
    found = re.search(r"report it with (\S+), which has the command and the traceback", line)
    assert found is not None
    file = Path(found[1])
    assert file.parent == broken
    assert file.stat().st_mode & 0o777 == 0o600
    text = file.read_text(encoding="utf-8")
    assert "Traceback (most recent call last)" in text
    assert "mistaken" in text
    assert "'gpipe'" in text


def test_an_error_of_the_users_code_is_told_from_ours(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def theirs(*_: object, **__: object) -> None:
        int("no number")

    monkeypatch.setattr(simulate, "make_schedule", theirs)
    done = bapipe(*LINE)
    assert done.returncode == 3
    assert re.match(r"bapipe: your code failed at \S*test_unexpected\.py:\d+: ValueError: ", done.stderr)
    assert len(list(broken.iterdir())) == 1


def test_the_traceback_is_printed_where_that_is_wanted(broken: Path) -> None:
    done = bapipe(*LINE, BAPIPE_TRACEBACK="1")
    assert done.returncode == 3
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.splitlines()[-1].endswith("please report it with the lines above")
    assert list(broken.iterdir()) == []


def test_without_a_folder_to_write_to_the_traceback_is_printed(
    broken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(broken / "missing"))
    done = bapipe(*LINE)
    assert done.returncode == 3
    assert "Traceback (most recent call last)" in done.stderr


def test_a_closed_pipe_is_quiet() -> None:
    """As `bapipe … | head` closes it: the reader has gone before anything is printed."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "bapipe", *LINE, "--json"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_ctrl_c_is_quiet(broken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(simulate, "make_schedule", interrupted)
    done = bapipe(*LINE)
    assert (done.returncode, done.stderr.strip()) == (130, "")
    assert list(broken.iterdir()) == []


def test_what_a_terminal_cannot_show_is_replaced() -> None:
    command = [sys.executable, "-m", "bapipe", *LINE]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=ascii_only, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"?" in done.stdout


def test_names_in_a_complaint_are_cut_and_escaped(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text('{"schema": "bapipe.plan/1", "\\u001b[31m\\u0007x": 1}', encoding="utf-8")
    done = bapipe("report", "plan.json", folder=tmp_path)
    assert done.returncode == 2
    assert "\x1b" not in done.stderr
    assert "unknown key '\\x1b[31m\\x07x'" in done.stderr
    done = bapipe("simulate", "gpipe" + "x" * 100_000)
    assert done.returncode == 2
    assert len(done.stderr) < 5000
