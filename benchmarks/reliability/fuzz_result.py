"""What came of the cases of a campaign: counts by the code that they were run with, and where they are kept.

Cases are numbered, and a result knows which numbers were run: a campaign that was stopped goes on with those that
are missing, and one of several parts, with other code in between, says how many each had.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import platform
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["Counts", "Failure", "code_name", "done_ranges", "failing_numbers", "missing_ranges", "record"]

FOLDER = Path(__file__).parent
MOST_KEPT = 200
"""failures that are listed one by one"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A case of which the contract does not hold."""

    case: int
    site: str
    """where it failed: the last of our own functions in the traceback, and the error"""
    kind: str
    line: tuple[str, ...]


@dataclass(slots=True)
class Counts:
    """Of cases that were run."""

    numbers: list[int] = field(default_factory=list)
    commands: int = 0
    by: Counter[str] = field(default_factory=Counter)
    exits: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    slowest: float = 0.0
    """seconds of CPU time"""
    peak: int = 0
    """bytes of resident memory of a worker"""

    def add(self, number: int, kind: str, found: dict[str, Any]) -> None:
        """Count one case, by its number, its kind and what a worker found."""
        self.numbers.append(number)
        self.by[kind] += 1
        self.commands += len(found["codes"])
        self.exits.update(str(code) for code in found["codes"])
        self.slowest = max(self.slowest, found["seconds"])
        self.peak = max(self.peak, found.get("peak", 0))


@cache
def code_name() -> str:
    """A name of the code that is tried: the package, and the programs that make the cases."""
    root = FOLDER.parents[1]
    package = (path for path in (root / "src" / "bapipe").rglob("*") if path.suffix in (".py", ".toml", ".json"))
    digest = hashlib.sha256()
    for path in (*sorted(package), *sorted(FOLDER.glob("fuzz_*.py"))):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def environment() -> str:
    return f"{platform.platform()}, Python {platform.python_version()}, numpy {np.__version__}"


def done_ranges(path: Path, part: str, seed: int) -> list[tuple[int, int]]:
    """First and one past the last of the numbers that were run, with whatever code."""
    return _joined((first, after) for entry in _entries(path, part, seed) for first, after in entry["numbers"])


def missing_ranges(done: list[tuple[int, int]], first: int, after: int, most: int) -> Iterator[tuple[int, int]]:
    """What of `first` to `after` was not run, in pieces of at most `most`."""
    begin = first
    for low, high in [*done, (after, after)]:
        while begin < min(low, after):
            end = min(begin + most, low, after)
            yield begin, end
            begin = end
        begin = max(begin, high)


def failing_numbers(path: Path, part: str, seed: int) -> list[int]:
    """Of the cases that are listed as failures."""
    return sorted({int(failure["case"]) for entry in _entries(path, part, seed) for failure in entry["failures"]})


def _entries(path: Path, part: str, seed: int) -> list[dict[str, Any]]:
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return [entry for entry in known.get(part, ()) if entry["seed"] == seed]


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for first, after in sorted((first, after) for first, after in ranges):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(after, found[-1][1]))
        else:
            found.append((first, after))
    return found


def record(path: Path, part: str, seed: int, counts: Counts, *, again: bool = False) -> None:
    """Add counts to a result, to those of the same code. `again`: they are of cases that had failed before, which
    counted then; only what failed of them now stays a failure, and the others are listed as mended."""
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # two campaigns may write into one result
        file.seek(0)
        known = json.loads(file.read() or "{}")
        known["environment"] = environment()
        entries = known.setdefault(part, [])
        if again:
            _mend(entries, seed, counts)
        else:
            _add(entries, seed, counts)
        file.seek(0)
        file.truncate()
        file.write(json.dumps(known, indent=1, ensure_ascii=False) + "\n")


def _add(entries: list[dict[str, Any]], seed: int, counts: Counts) -> None:
    own = next((entry for entry in entries if (entry["seed"], entry["code"]) == (seed, code_name())), None)
    if own is None:
        own = {
            "seed": seed, "code": code_name(), "numbers": [], "cases": 0, "commands run": 0, "cases by kind": {},
            "exit codes": {}, "slowest command, seconds of CPU time": 0.0,
            "largest resident memory of a worker, bytes": 0, "failed cases": 0, "failures": [], "mended": [],
        }  # fmt: skip
        entries.append(own)
    own["numbers"] = _joined([*own["numbers"], *((number, number + 1) for number in counts.numbers)])
    own["cases"] += len(counts.numbers)
    own["commands run"] += counts.commands
    for key, more in (("cases by kind", counts.by), ("exit codes", counts.exits)):
        own[key] = dict(sorted((Counter(own[key]) + more).items()))
    slow, large = "slowest command, seconds of CPU time", "largest resident memory of a worker, bytes"
    own[slow] = max(own[slow], round(counts.slowest, 2))
    own[large] = max(own[large], counts.peak)
    own["failed cases"] += len(counts.failures)
    own["failures"] = [*own["failures"], *map(asdict, counts.failures)][:MOST_KEPT]


def _mend(entries: list[dict[str, Any]], seed: int, counts: Counts) -> None:
    failing = {failure.case for failure in counts.failures}
    right = set(counts.numbers) - failing
    for entry in (entry for entry in entries if entry["seed"] == seed):
        gone = [failure for failure in entry["failures"] if failure["case"] in right]
        entry["failures"] = [failure for failure in entry["failures"] if failure["case"] not in right]
        entry["mended"] = sorted({*entry["mended"], *(failure["site"] for failure in gone)})
