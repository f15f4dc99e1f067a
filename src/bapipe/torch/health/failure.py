"""How a run that fails says so on one line: which rank on which host, stage, action, and why. Imports no torch.

`bapipe.torch.health.watchdog` tells all ranks; for the launcher of `bapipe run` they also leave it in a file.
"""

from __future__ import annotations

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

__all__ = ["Failure", "RunError", "explain", "forget_failure", "read_failures", "write_failure"]

_ENDED = re.compile(r"^\s*rank\s*: (\d+) .*\n\s*exitcode\s*: (-?\d+) ", re.MULTILINE)
"""two lines of torchrun's summary of each rank that failed"""


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
    """exit code: 2 for what the user gave, else 1"""
    table: str = ""
    """what every rank was at, where one did not answer"""
    at: float
    """seconds since the epoch"""

    @property
    def line(self) -> str:
        return f"{self.where}: {self.reason}" if self.where else self.reason


class RunError(BaPipeError):
    """The run has failed; its message is the line that every rank prints."""

    def __init__(self, failure: Failure, *, told: bool = False) -> None:
        """`told`: the line has been printed already."""
        self.failure = failure
        self.told = told
        super().__init__(failure.line)


def write_failure(failure: Failure, folder: Path, *, by: int) -> None:
    """Leave word for the launcher; `by` is the rank that leaves it, who may have it from another."""
    write_text(folder / f"failure-{by}.json", dump_json(failure))


def forget_failure(folder: Path, *, by: int) -> None:
    """A rank that was started again takes back what it left when it failed."""
    (folder / f"failure-{by}.json").unlink(missing_ok=True)


def read_failures(folder: Path) -> list[Failure]:
    """All ranks' failures, the earliest first."""
    found = [decode(Failure, load_json(path), where=str(path)) for path in folder.glob("failure-*.json")]
    return sorted(found, key=lambda failure: (failure.at, failure.by))


def explain(folder: Path, *, stages: Sequence[Sequence[int]], host: str, summary: str, code: int) -> Failure:
    """Why the run failed, from what the ranks left in the folder.

    `stages` are each rank's, `summary` is what torchrun said, `code` how it ended. A rank that failed of itself
    comes before those that lost it, and what torchrun knows of a rank's end before what others could see of it.
    """
    failures, signals = read_failures(folder), _killed(summary)
    own = next((failure for failure in failures if not failure.lost), None)
    if own is not None:
        return own
    if failures:
        first = failures[0]
        if first.rank not in signals or first.table:
            return first
        noticed = f"was killed by {signals[first.rank]}; rank {first.by} noticed"
        return replace(first, reason=noticed)
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
            known = number in {int(item) for item in signal.Signals}
            found[int(rank)] = signal.Signals(number).name if known else f"signal {number}"
    return found
