"""How a run that fails says so on one line: which rank on which host, stage, action, and why. Imports no torch.

`bapipe.torch.health.watchdog` lets all ranks know; for the launcher of `bapipe run` they also leave it in a file.
"""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bapipe.errors import BaPipeError
from bapipe.io.decode import decode
from bapipe.io.files import dump_json, load_json, write_text
from bapipe.torch.health.rank_status import located, progress_file, read_progress

__all__ = [
    "Failure",
    "RunError",
    "explain",
    "forget_notes",
    "parse_failure",
    "read_failures",
    "write_failure",
    "write_finished",
]

_ENDED = re.compile(r"^\s*rank\s*: (\d+) .*\n\s*exitcode\s*: (-?\d+) ", re.MULTILINE)
"""two lines of torchrun's summary of each rank that failed"""
_STOPPED = re.compile(r"SignalException: Process \d+ got signal: (\d+)")
"""torchrun's last line when a signal stopped it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a run ends."""

    rank: int
    """that failed"""
    by: int
    """that says so"""
    where: str
    """rank, host, stage and action; empty if it concerns no single rank: a plan refused, a check that failed"""
    reason: str
    lost: bool = False
    """whether the rank cannot say so itself: it has gone or does not answer"""
    code: int = 1
    """exit code: 2 for what the user gave, 128 + its number where a signal stopped the run, else 1; never 0"""
    table: str = ""
    """what every rank was at, where one did not answer"""
    at: float
    """seconds since the epoch"""

    def __post_init__(self) -> None:
        if not _is_code(self.code):
            object.__setattr__(self, "code", 1)

    @property
    def line(self) -> str:
        return f"{self.where}: {self.reason}" if self.where else self.reason


class RunError(BaPipeError):
    """The run has failed; its message is the line that every rank prints."""

    def __init__(self, failure: Failure, *, reported: bool = False) -> None:
        """`reported`: the line has been printed or logged already."""
        self.failure = failure
        self.reported = reported
        super().__init__(failure.line)


def write_failure(failure: Failure, folder: Path, *, by: int) -> None:
    """Leave word for the launcher; `by` is the rank that leaves it, who may have it from another."""
    write_text(folder / f"failure-{by}.json", dump_json(failure))


def write_finished(folder: Path, *, by: int) -> None:
    """A rank has done all it was started for; the launcher believes no other sign of success."""
    write_text(folder / f"finished-{by}", "")


def forget_notes(folder: Path, *, by: int) -> None:
    """A rank that was started again takes back what it left when it ended."""
    for name in (f"failure-{by}.json", f"finished-{by}"):
        (folder / name).unlink(missing_ok=True)


def parse_failure(said: str | object, *, ranks: int) -> Failure:
    """The failure that somebody left, as JSON or plain values, of a run of so many ranks.

    Whatever it is, it is a failure: one that cannot be read has code 1, and so has one whose code is none. A rank
    that the run does not have cannot be lost.
    """
    try:
        data = json.loads(said) if isinstance(said, str) else said
        if isinstance(data, dict) and not _is_code(data.get("code", 1)):
            data = {**data, "code": 1}
        found = decode(Failure, data, where="failure")
    except (BaPipeError, ValueError, RecursionError):
        return _unseen(0, "", "a rank failed, and what it said of it cannot be read")
    return found if 0 <= found.rank < ranks else replace(found, rank=0, lost=False)


def _is_code(code: object) -> bool:
    return type(code) is int and 1 <= code <= 255


def read_failures(folder: Path, *, ranks: int) -> list[Failure]:
    """All ranks' failures, the earliest first."""
    found = []
    for path in folder.glob("failure-*.json"):
        try:
            found.append(parse_failure(load_json(path), ranks=ranks))
        except BaPipeError:
            found.append(parse_failure(None, ranks=ranks))
    return sorted(found, key=lambda failure: (failure.at, failure.by))


def explain(
    folder: Path, *, stages: Sequence[Sequence[int]], host: str, summary: str, code: int
) -> Failure | None:
    """Why the run failed, from what the ranks left in the folder; None if all of them have finished.

    `stages` are each rank's, `summary` is what torchrun said, `code` how it ended. A rank that failed of itself
    comes before what happened to torchrun, then those that lost a rank, and what torchrun knows of a rank's end
    before what others could see of it.
    """
    failures, signals = read_failures(folder, ranks=len(stages)), _killed(summary)
    own = next((failure for failure in failures if not failure.lost), None)
    if own is not None:
        return own
    if code < 0:
        return _unseen(0, "", f"torchrun was killed by {_name(-code)}, and its ranks with it")
    stopped = _STOPPED.findall(summary) if code else []
    if stopped:
        reason = f"stopped by {_name(int(stopped[-1]))}, sent to torchrun"
        return replace(_unseen(0, "", reason), code=128 + int(stopped[-1]))
    if failures:
        first = failures[0]
        if first.rank not in signals or first.table:
            return first
        noticed = f"was killed by {signals[first.rank]}; rank {first.by} noticed"
        return replace(first, reason=noticed)
    if code == 0:
        missing = [rank for rank in range(len(stages)) if not (folder / f"finished-{rank}").exists()]
        if not missing:
            return None
        where = located(None, missing[0], stages=stages[missing[0]], host=host)
        return _unseen(missing[0], where, "ended before it had finished, with code 0")
    if signals:
        rank = min(signals)
        known = read_progress(progress_file(folder, rank))
        at, stage = ("starting up", None) if known is None else known[:2]
        own_stages = [stage] if stage is not None else stages[rank] if rank < len(stages) else ()
        where = f"{located(None, rank, stages=own_stages, host=host)}, {at}"
        return replace(_unseen(rank, where, f"was killed by {signals[rank]}"), lost=True)
    last = (summary.strip().splitlines() or ["it said nothing"])[-1]
    return _unseen(0, "", f"torchrun ended with code {code}: {last[:300]}")


def _unseen(rank: int, where: str, reason: str) -> Failure:
    return Failure(rank=rank, by=rank, where=where, reason=reason, at=time.time())


def _killed(summary: str) -> dict[int, str]:
    """Ranks that torchrun saw killed, except by its own SIGTERM, with the signal's name."""
    found = {}
    for rank, code in _ENDED.findall(summary):
        number = -int(code)
        if number > 0 and number != signal.SIGTERM:
            found[int(rank)] = _name(number)
    return found


def _name(number: int) -> str:
    known = number in {int(item) for item in signal.Signals}
    return signal.Signals(number).name if known else f"signal {number}"
