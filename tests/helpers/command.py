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


def bapipe(*arguments: str, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command that starts no ranks; its exit code, standard output and standard error.

    `variables` are environment variables, such as COLUMNS.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with (
        mock.patch.object(sys, "argv", ["bapipe", *arguments]),
        mock.patch.object(sys, "path", list(sys.path)),
        mock.patch.dict(os.environ, variables),
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
    texts = (stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(["bapipe", *arguments], code, *texts)


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
