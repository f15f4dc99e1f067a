"""`bapipe …` within the tests' own process: what a user sees of it, without the start of a process."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from bapipe.cli import main

__all__ = ["bapipe", "refused"]


def bapipe(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command that starts no ranks; its exit code, standard output and standard error."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["bapipe", *arguments]),
        mock.patch.object(sys, "path", list(sys.path)),
        _within(folder),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        else:
            code = 0
    return subprocess.CompletedProcess(["bapipe", *arguments], code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def _within(folder: Path | None) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder or before)
    try:
        yield
    finally:
        os.chdir(before)


def refused(*arguments: str, folder: Path | None = None) -> str:
    """The one line on standard error of a refused command, which prints nothing else."""
    done = bapipe(*arguments, folder=folder)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr
