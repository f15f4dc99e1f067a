"""What both campaigns share: a worker process that is watched and restarted, cases one by one, failures shrunk."""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import platform
import re
import selectors
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

__all__ = ["CPU_LIMIT", "IDLE_LIMIT", "Campaign", "Worker", "encoded", "environment", "run_campaign", "site_of"]

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
            found["wrong"] = "slow"
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


@dataclass(slots=True, kw_only=True)
class Campaign:
    """Counts, and every failure once by its site."""

    seed: int
    first: int
    """number of the first case"""
    seconds: float
    """of wall time, after which no more cases begin"""
    shrink: Callable[[int, dict[str, Any], str, Worker], dict[str, Any]]
    """a smaller case that fails at the same site"""
    failures_folder: Path
    cases: int = 0
    commands: int = 0
    by: Counter[str] = field(default_factory=Counter)
    exits: Counter[str] = field(default_factory=Counter)
    failures: dict[str, dict[str, Any]] = field(default_factory=dict)
    slowest: float = 0.0
    peak: int = 0

    def run(self, cases: Iterable[tuple[int, str, dict[str, Any]]]) -> None:
        """Go through (number, kind, case) until they or the time end."""
        worker, began = Worker(), time.monotonic()
        told = began
        try:
            for number, kind, case in cases:
                if time.monotonic() - began > self.seconds:
                    break
                found = worker.run(case)
                self.cases += 1
                self.by[kind] += 1
                self.commands += len(found["codes"])
                self.exits.update(str(code) for code in found["codes"])
                self.slowest = max(self.slowest, found["seconds"])
                self.peak = max(self.peak, found.get("peak", 0))
                if found["wrong"] is not None:
                    self._keep(number, kind, case, found, worker)
                if time.monotonic() - told > 30:
                    told = time.monotonic()
                    rate = self.cases / (told - began)
                    print(f"{self.cases} cases, {rate:.0f}/s, {len(self.failures)} sites", flush=True)
        finally:
            worker.end()

    def _keep(self, number: int, kind: str, case: dict[str, Any], found: dict[str, Any], worker: Worker) -> None:
        site = site_of(found)
        if site in self.failures:
            self.failures[site]["count"] += 1
            return
        print(f"case {number} ({kind}): {site}", flush=True)
        small = self.shrink(number, case, site, worker)
        entry = {"site": site, "case": number, "kind": kind, "line": found["line"], "count": 1}
        self.failures[site] = entry
        self.failures_folder.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^A-Za-z0-9]+", "-", site)[:80]
        text = json.dumps({**entry, "small": small, "stderr": found["stderr"]}, indent=1)
        (self.failures_folder / f"{name}.json").write_text(text)

    def values(self) -> dict[str, Any]:
        """For the result."""
        return {
            "seed": self.seed,
            "first case": self.first,
            "cases": self.cases,
            "commands run": self.commands,
            "cases by kind": dict(sorted(self.by.items())),
            "exit codes": dict(sorted(self.exits.items())),
            "failures": sorted(self.failures.values(), key=lambda entry: str(entry["site"])),
            "slowest command, seconds of CPU time": round(self.slowest, 2),
            "largest resident memory of a worker, bytes": self.peak,
        }


def encoded(files: dict[str, bytes]) -> dict[str, str]:
    """Files of a case, as a worker takes them."""
    return {name: base64.b64encode(data).decode() for name, data in files.items()}


def environment() -> str:
    return f"{platform.platform()}, Python {platform.python_version()}, numpy {np.__version__}"


def record_result(part: str, values: dict[str, Any], path: Path) -> None:
    """Put one campaign's values behind those of others in the result: a campaign may be run in several parts."""
    known = json.loads(path.read_text()) if path.exists() else {}
    known["environment"] = environment()
    known.setdefault(part, []).append(values)
    path.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")


def run_campaign(
    words: str | None,
    part: str,
    *,
    count: int,
    case: Callable[[int, int], tuple[str, dict[str, Any]]],
    shrink: Callable[[int, int, dict[str, Any], str, Worker], dict[str, Any]],
) -> None:
    """The command line of a campaign: run cases, print and record what came of them; exit code 1 for a failure.

    `case` makes a case from seed and number, and `shrink` a smaller one that fails at the same site.
    """
    parser = argparse.ArgumentParser(description=words)
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after so many")
    parser.add_argument("--failures", type=Path, default=FOLDER / "failures")
    parser.add_argument("--out", type=Path, help="result file to write into")
    options = parser.parse_args()
    campaign = Campaign(
        seed=options.seed,
        first=options.first,
        seconds=options.seconds,
        shrink=partial(shrink, options.seed),
        failures_folder=options.failures,
    )
    numbers = range(options.first, options.first + options.count)
    campaign.run((number, *case(options.seed, number)) for number in numbers)
    print(campaign.values())
    if options.out is not None:
        record_result(part, campaign.values(), options.out)
    sys.exit(1 if campaign.failures else 0)
