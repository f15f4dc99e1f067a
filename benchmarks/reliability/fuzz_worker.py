"""A process that runs commands within itself, one case after another, under limits on memory.

It is started by the campaigns. Each line on its standard input is a case as JSON, {"files": {name: base64},
"lines": [[argument, …], …], "reads": [format, name]}, each line on its standard output what became of it. Where
"reads" is given and the format's own reader refuses the file, only the first line is run: every command would
refuse it alike.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import resource
import shutil
import sys
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import bapipe.cli
from bapipe.cli.unexpected import SHOW_TRACEBACK
from bapipe.costs.profile import read_profile
from bapipe.errors import BaPipeError
from bapipe.hardware.cluster_file import read_cluster
from bapipe.models.layer_table import read_layer_table
from bapipe.records.plan import read_plan
from bapipe.records.run_record import read_run
from bapipe.schedule.schedule_file import read_schedule

__all__ = ["MEMORY_LIMIT", "run_case", "run_line"]

MEMORY_LIMIT = 2 * 10**9
"""bytes of private memory that a command may ask for"""
_READERS = {
    "plan": read_plan,
    "run": read_run,
    "profile": read_profile,
    "cluster": read_cluster,
    "schedule": read_schedule,
    "schedule table": read_schedule,
    "layers": read_layer_table,
}
_WRITTEN = {
    "planned.json": read_plan,
    "again.json": read_profile,
    "merged.json": read_profile,
    "traced.json": read_profile,
    "c.toml": read_cluster,
    "out.csv": read_schedule,
}
"""files that commands write -> their reader"""
_TOO_MUCH = "not enough memory"


class NoProcesses:
    """An audit hook of Python: while a command runs, a process that it starts is refused."""

    EVENTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"})

    def __init__(self) -> None:
        self.on = False
        sys.addaudithook(self)

    def __call__(self, event: str, _: tuple[Any, ...]) -> None:
        if self.on and event in self.EVENTS:
            raise BaPipeError(f"no process is started here ({event})")


_no_processes = NoProcesses()


def run_line(arguments: list[str], kept: int = 4000) -> dict[str, Any]:
    """One command line, in the current folder: exit code, seconds of CPU time, the ends of what it printed."""
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True)
    began = time.process_time()
    _no_processes.on = True
    with (
        mock.patch.object(sys, "argv", ["bapipe", *arguments]),
        mock.patch.object(sys, "path", list(sys.path)),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            bapipe.cli.main()
            code: Any = 0
        except SystemExit as stop:
            code = stop.code
        finally:
            _no_processes.on = False
    seconds = time.process_time() - began
    said = err.buffer.getvalue().decode()
    printed = out.buffer.getvalue().decode()
    return {"code": code, "seconds": seconds, "stderr": said[-kept:], "stdout": printed[-kept:]}


def complaint(found: dict[str, Any]) -> str | None:
    """What breaks the contract, None if nothing does: 0, 1 or 2, no traceback, one line where it refuses."""
    if found["code"] not in (0, 1, 2):
        return f"exit code {found['code']}"
    if "Traceback (most recent call last)" in found["stderr"]:
        return "a traceback"
    if _TOO_MUCH in found["stderr"]:
        return f"more than {MEMORY_LIMIT / 1e9:g} GB"
    if found["code"] == 2 and not found["stderr"].startswith("bapipe: "):
        return "refused without a line"
    return None


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Every line of a case in a folder that holds its files and nothing else."""
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    for name, data in case["files"].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(base64.b64decode(data))
    os.chdir(folder)
    codes, slowest = [], 0.0
    for line in case["lines"] if _readable(case.get("reads")) else case["lines"][:1]:
        found = run_line(line)
        codes.append(found["code"])
        slowest = max(slowest, found["seconds"])
        wrong = complaint(found)
        if wrong is None and found["code"] == 0 and "reads" in case:
            refused = _refused_output(folder)
            if refused is not None:
                wrong, found["stderr"] = "wrote what it refuses", refused
        if wrong is not None:
            return {"wrong": wrong, "line": line, "stderr": found["stderr"], "codes": codes, "seconds": slowest}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"wrong": None, "codes": codes, "seconds": slowest, "peak": peak, "stderr": found["stderr"][:200]}


def _refused_output(folder: Path) -> str | None:
    """Why BaPipe itself cannot read what a command has written."""
    for name, read in _WRITTEN.items():
        if (folder / name).exists():
            try:
                read(str(folder / name))
            except BaPipeError as error:
                return str(error)
    return None


def _readable(reads: list[str] | None) -> bool:
    if reads is None or reads[0] not in _READERS:
        return True
    try:
        _READERS[reads[0]](reads[1])
    except BaPipeError:
        return False
    except Exception:
        return True  # the commands will show it
    return True


def main() -> None:
    """Answer until standard input ends, in the folder that is given."""
    # Private writable memory: what a command asks for, without the libraries that are mapped into every process.
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
    os.environ.update({SHOW_TRACEBACK: "1", "COLUMNS": "100"})
    warnings.simplefilter("error", RuntimeWarning)  # an overflow or a NaN that nobody refused
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    for line in sys.stdin:
        json.dump(run_case(json.loads(line), Path(sys.argv[1])), answers)
        answers.write("\n")
        answers.flush()


if __name__ == "__main__":
    main()
