"""How a run that fails says so on one line: which rank on which host, stage, action, and why. Imports no torch.

`bapipe.torch.health.watchdog` lets all ranks know; for the launcher of `bapipe run` they also leave it in a file.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bapipe.errors import BaPipeError
from bapipe.io.decode import decode
from bapipe.io.files import dump_json, load_json, write_text
from bapipe.torch.health.rank_end import RankEnd, signal_name
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
    slowed: float = 0.0
    """how many times as long as expected the rank computes, where the run ended to be planned again for that; 0:
    it did not"""
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
    write_text(folder / f"failure-{by}.json", dump_json(failure), durable=False)


def write_finished(folder: Path, *, by: int) -> None:
    """A rank has done all it was started for; the launcher believes no other sign of success."""
    write_text(folder / f"finished-{by}", "", durable=False)


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
    folder: Path, *, stages: Sequence[Sequence[int]], host: str, ends: Sequence[RankEnd]
) -> Failure | None:
    """Why the run failed, from what the ranks left in the folder; None if all of them have finished.

    `stages` are each rank's, `ends` how each ended, in that order. A rank that failed of itself comes first,
    unless another ended before without a word; then those that do not answer. What the launcher knows of a rank's
    end comes before what others could see of it.
    """
    failures = read_failures(folder, ranks=len(stages))
    gone = next((end for end in ends if _left_no_word(folder, end)), None)
    own = next((failure for failure in failures if not failure.lost), None)
    if own is not None and (gone is None or own.at <= gone.at):
        return own
    first = next((failure for failure in failures if failure.lost), None)
    if first is not None and (gone is None or first.table):
        return first
    if gone is not None:
        noticed = next((failure for failure in failures if failure.rank == gone.rank), None)
        where = _where(folder, gone.rank, stages=stages, host=host) if noticed is None else noticed.where
        by = "" if noticed is None else f"; rank {noticed.by} noticed"
        return replace(_unseen(gone.rank, where, f"{_how(gone)}{by}"), lost=bool(gone.killed_by))
    stopped = [end for end in ends if end.stopped]
    if stopped:
        others = "".join(f", as was rank {end.rank}" for end in stopped[1:])
        where = _where(folder, stopped[0].rank, stages=stages, host=host)
        reason = f"was stopped by a signal for {stopped[0].stopped:.0f} s{others}"
        return replace(_unseen(stopped[0].rank, where, reason), lost=True)
    told = next((end for end in ends if end.code), None)
    if told is None:
        return None
    return _unseen(told.rank, _where(folder, told.rank, stages=stages, host=host), _how(told))


def _left_no_word(folder: Path, end: RankEnd) -> bool:
    """Whether a rank ended of itself, before it had finished, and could not say why."""
    said = any((folder / name).exists() for name in (f"failure-{end.rank}.json", f"finished-{end.rank}"))
    return not end.told and not said


def _how(end: RankEnd) -> str:
    if end.code == 0:
        return "ended before it had finished, with code 0"
    if end.code < 0:
        return f"was killed by {signal_name(-end.code)}"
    return f"ended with code {end.code}" + (f": {end.said}" if end.said else "")


def _where(folder: Path, rank: int, *, stages: Sequence[Sequence[int]], host: str) -> str:
    """The rank, its host, stage and what it was at when it ended."""
    known = read_progress(progress_file(folder, rank))
    at, stage = ("starting up", None) if known is None else known[:2]
    own = [stage] if stage is not None else stages[rank] if rank < len(stages) else ()
    return f"{located(None, rank, stages=own, host=host)}, {at}"


def _unseen(rank: int, where: str, reason: str) -> Failure:
    return Failure(rank=rank, by=rank, where=where, reason=reason, at=time.time())
