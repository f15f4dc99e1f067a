"""The command line of a campaign: cases in several processes, and a result that a later call goes on with."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fuzz_campaign import Worker, run_cases
from fuzz_result import Counts, code_name, done_ranges, failing_numbers, missing_ranges, record

__all__ = ["Program", "run_campaign"]

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A campaign."""

    part: str
    """its name in the result"""
    count: int
    """cases that are wanted"""
    block: int
    """cases that a process runs before it says what came of them"""
    case: Callable[[int, int], tuple[str, dict[str, Any]]]
    """from seed and number: its kind, and what a worker runs"""
    shrink: Callable[[int, int, dict[str, Any], str, Worker], dict[str, Any]]
    """a smaller case that fails at the same site, from seed, number, case and site"""


_worker: Worker | None = None
"""of this process"""


def _block(program: Program, seed: int, until: float, failures: Path, numbers: list[int]) -> Counts:
    global _worker
    _worker = _worker or Worker()
    cases = ((number, *program.case(seed, number)) for number in numbers)
    return run_cases(cases, worker=_worker, shrink=partial(program.shrink, seed), until=until, failures=failures)


def run_campaign(words: str | None, program: Program) -> None:
    """Run cases, print and record what came of them; exit code 1 for a failure."""
    parser = argparse.ArgumentParser(description=words)
    parser.add_argument("--count", type=int, default=program.count)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after so many")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--again", action="store_true", help="only cases that failed before, with the code as it is"
    )
    parser.add_argument("--failures", type=Path, default=FOLDER / "failures")
    parser.add_argument("--out", type=Path, help="result file: what it has is not run again, what is new is added")
    given = parser.parse_args()
    blocks = _blocks(program, given)
    total = sum(map(len, blocks))
    print(f"{total} cases to run, with code {code_name()}", flush=True)
    program.case(given.seed, given.first)  # what all cases share is made before processes are
    began = told = time.monotonic()
    run = partial(_block, program, given.seed, began + given.seconds, given.failures)
    cases = wrong = 0
    with multiprocessing.get_context("fork").Pool(given.jobs) as pool:
        for counts in pool.imap_unordered(run, blocks):
            cases, wrong = cases + len(counts.numbers), wrong + len(counts.failures)
            if given.out is not None and counts.numbers:
                record(given.out, program.part, given.seed, counts, again=given.again)
            if time.monotonic() - told > 30:
                told = time.monotonic()
                print(f"{cases} of {total}, {cases / (told - began):.0f}/s, {wrong} failed", flush=True)
    took = time.monotonic() - began
    print(json.dumps({"part": program.part, "cases": cases, "failed": wrong, "seconds": round(took, 1)}))
    sys.exit(1 if wrong else 0)


def _blocks(program: Program, given: argparse.Namespace) -> list[list[int]]:
    if given.again:
        return [[number] for number in failing_numbers(given.out, program.part, given.seed)]
    done = [] if given.out is None else done_ranges(given.out, program.part, given.seed)
    pieces = missing_ranges(done, given.first, given.first + given.count, program.block)
    return [list(range(first, after)) for first, after in pieces]
