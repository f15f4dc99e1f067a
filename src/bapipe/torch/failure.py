"""How a run that fails says so on one line: which rank, which stage, which action. Imports no torch.

Every rank writes the action it is at into a file of its own, and its failure into another. A rank that is killed
leaves only the first; its neighbours' failures name it. The launcher reads both.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bapipe.decode import decode
from bapipe.files import dump_json, load_json, write_text

__all__ = ["Failure", "Progress", "explain", "read_failures", "write_failure"]

_WIDTH = 64
_ENDED = re.compile(r"^\s*rank\s*: (\d+) .*\n\s*exitcode\s*: (-?\d+) ", re.MULTILINE)
"""two lines of torchrun's summary of each rank that failed"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why one rank stopped."""

    rank: int
    reason: str
    """what follows the rank, stage and action, or all there is to say if `whole`"""
    whole: bool = False
    """whether the reason concerns no single rank: a plan that is refused, a check that failed"""
    code: int = 1
    """exit code: 2 for what the user gave, else 1"""
    lost: bool = False
    """whether the reason is that another rank has gone or does not answer"""
    lost_rank: int | None = None
    """which one, where it is known"""
    at: float
    """seconds since the epoch"""


class Progress:
    """The action that a rank is at, kept in a file that outlives the rank. A note costs one write of 64 bytes."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self.current = "starting up"
        self.step = 0
        path = None if folder is None else _progress_file(folder, rank)
        self._handle = None if path is None else os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)

    def begin(self, step: int) -> None:
        """A new mini-batch."""
        self.step = step
        self.note(f"before step {step}")

    def note(self, text: str) -> None:
        self.current = text
        if self._handle is not None:
            os.pwrite(self._handle, text.encode()[:_WIDTH].ljust(_WIDTH), 0)


def _progress_file(folder: Path, rank: int) -> Path:
    return folder / f"progress-{rank}"


def _progress(folder: Path, rank: int) -> str:
    try:
        text = _progress_file(folder, rank).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        text = ""
    return text or "starting up"


def write_failure(failure: Failure, folder: Path) -> None:
    """Leave word for the launcher."""
    write_text(folder / f"failure-{failure.rank}.json", dump_json(failure))


def read_failures(folder: Path) -> list[Failure]:
    """All ranks' failures, the earliest first."""
    found = [decode(Failure, load_json(path), where=str(path)) for path in folder.glob("failure-*.json")]
    return sorted(found, key=lambda failure: (failure.at, failure.rank))


def explain(folder: Path, *, stages: Sequence[int], summary: str, code: int) -> tuple[str, int]:
    """The one line that says why the run failed, and the exit code.

    `stages` is each rank's stage, `summary` what torchrun said, `code` how it ended.
    """

    def located(rank: int) -> str:
        stage = stages[rank] if rank < len(stages) else rank
        return f"rank {rank}, stage {stage}, {_progress(folder, rank)}"

    failures = read_failures(folder)
    signals = _killed(summary)
    own = next((failure for failure in failures if not failure.lost), None)
    if own is not None:
        return own.reason if own.whole else f"{located(own.rank)}: {own.reason}", own.code
    # A rank that lost its neighbour ends too and is then lost by the next: the first one lost began it.
    noticed = next((failure for failure in failures if failure.lost_rank is not None), None)
    if noticed is not None and noticed.lost_rank is not None:
        rank = noticed.lost_rank
        what = (
            f"was killed by {signals[rank]}" if rank in signals else noticed.reason.removeprefix(f"rank {rank} ")
        )
        by = f"rank {noticed.rank} noticed at {_progress(folder, noticed.rank)}"
        return f"{located(rank)}: {what}; {by}", 1
    if signals:
        rank = min(signals)
        return f"{located(rank)}: was killed by {signals[rank]}", 1
    if failures:
        return f"{located(failures[0].rank)}: {failures[0].reason}", 1
    last = (summary.strip().splitlines() or ["it said nothing"])[-1]
    return f"torchrun ended with code {code}: {last[:300]}", 1


def _killed(summary: str) -> dict[int, str]:
    """Ranks that torchrun saw killed, except by its own SIGTERM, with the signal's name."""
    found = {}
    for rank, code in _ENDED.findall(summary):
        number = -int(code)
        if number > 0 and number != signal.SIGTERM:
            known = number in {int(item) for item in signal.Signals}
            found[int(rank)] = signal.Signals(number).name if known else f"signal {number}"
    return found
