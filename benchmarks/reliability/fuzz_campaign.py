"""Runs cases one by one in a worker process that is watched and started again; failures are shrunk and counted."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from fuzz_result import Counts, Failure

__all__ = ["CPU_LIMIT", "IDLE_LIMIT", "Worker", "encoded", "run_cases", "site_of"]

FOLDER = Path(__file__).parent
CPU_LIMIT = 10.0
"""seconds of CPU time that one command may take"""
IDLE_LIMIT = 60.0
"""seconds without any use of the CPU after which a case has hung; the wall time says nothing on a busy machine"""
_FRAME = re.compile(r'File "([^"]*bapipe[^"]*)", line \d+, in (\S+)')


class Worker:
    """A `fuzz_worker.py` that is started when it is needed, and again when it was lost."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="bapipe-fuzz-", ignore_cleanup_errors=True)
        self._cases = 0

    def run(self, case: dict[str, Any]) -> dict[str, Any]:
        """What became of a case; one that ends or hangs the process is wrong too."""
        if self._process is None or self._cases >= 5000:
            self._start()
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        self._cases += 1
        began = time.monotonic()
        lost: dict[str, Any] = {"codes": [], "line": case["lines"][0], "stderr": ""}
        try:
            process.stdin.write(json.dumps(case) + "\n")
            process.stdin.flush()
            hangs = _wait(process, process.stdout, most=CPU_LIMIT * (len(case["lines"]) + 1))
            if hangs:
                self.close()
                return {**lost, "wrong": hangs, "seconds": time.monotonic() - began}
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            code = process.wait()
            self._process = None
            return {**lost, "wrong": f"the process ended with {code}", "seconds": time.monotonic() - began}
        found: dict[str, Any] = json.loads(answer)
        if found["wrong"] is None and found["seconds"] > CPU_LIMIT:
            return {**lost, **found, "wrong": "slow"}
        return found

    def _start(self) -> None:
        self.close()
        variables = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, str(FOLDER / "fuzz_worker.py"), self._folder.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        )
        self._cases = 0

    def end(self) -> None:
        """End the process, and remove its folder."""
        self.close()
        self._folder.cleanup()

    def close(self) -> None:
        """End the process; the next case starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()


def _wait(process: subprocess.Popen[str], answers: IO[str], *, most: float) -> str | None:
    """Until there is an answer. What is wrong where a process takes more CPU time than `most`, or does nothing."""
    first = before = _cpu_seconds(process.pid)
    changed = time.monotonic()
    with selectors.DefaultSelector() as ready:
        ready.register(answers, selectors.EVENT_READ)
        while not ready.select(5.0):
            now = _cpu_seconds(process.pid)
            if now - first > most:
                return "slow"
            if now > before:
                before, changed = now, time.monotonic()
            elif time.monotonic() - changed > IDLE_LIMIT:
                return "hangs"
    return None


def _cpu_seconds(pid: int) -> float:
    """That a process has used; 0 where there is none any more."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def site_of(found: dict[str, Any]) -> str:
    """Where it failed: the last of our own functions in the traceback, and the error."""
    frames = _FRAME.findall(found["stderr"])
    lines = [line for line in found["stderr"].splitlines() if line and not line.startswith((" ", "bapipe: "))]
    last = lines[-1].split(":")[0][:60] if lines and frames else ""
    place = f"{Path(frames[-1][0]).name}:{frames[-1][1]}" if frames else found["line"][0]
    return f"{found['wrong']} {last} in {place}"


Shrink = Callable[[int, dict[str, Any], str, Worker], dict[str, Any]]
"""a smaller case that fails at the same site, from number, case and site"""


def run_cases(
    cases: Iterable[tuple[int, str, dict[str, Any]]],
    *,
    worker: Worker,
    shrink: Shrink,
    until: float,
    failures: Path,
) -> Counts:
    """Go through (number, kind, case) until they end, or the monotonic clock reaches `until`."""
    counts = Counts()
    for number, kind, case in cases:
        if time.monotonic() > until:
            break
        found = worker.run(case)
        counts.add(number, kind, found)
        if found["wrong"] is not None:
            site = site_of(found)
            counts.failures.append(Failure(case=number, site=site, kind=kind, line=tuple(found["line"])))
            _keep(failures, number, case, site, found, shrink=shrink, worker=worker)
    return counts


def _keep(
    folder: Path,
    number: int,
    case: dict[str, Any],
    site: str,
    found: dict[str, Any],
    *,
    shrink: Shrink,
    worker: Worker,
) -> None:
    """Write the shrunk case of a site, the first that is seen of it."""
    path = folder / (re.sub(r"[^A-Za-z0-9]+", "-", site)[:80] + ".json")
    if path.exists():
        return
    print(f"case {number}: {site}", flush=True)
    small = shrink(number, case, site, worker)
    folder.mkdir(parents=True, exist_ok=True)
    entry = {"site": site, "case": number, "line": found["line"], "small": small, "stderr": found["stderr"]}
    path.write_text(json.dumps(entry, indent=1))


def encoded(files: dict[str, bytes]) -> dict[str, str]:
    """Files of a case, as a worker takes them."""
    return {name: base64.b64encode(data).decode() for name, data in files.items()}
