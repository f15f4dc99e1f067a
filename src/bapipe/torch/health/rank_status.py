"""What a rank is at and whom it waits for. Imports no torch.

Every rank keeps the action it is at in a file, which outlives a rank that is killed, and writes it for the
others twice a second (`bapipe.torch.health.watchdog`).
"""

from __future__ import annotations

import json
import mmap
import os
import stat
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bapipe.errors import BaPipeError
from bapipe.io.decode import decode
from bapipe.schedule.actions import Action, Kind
from bapipe.units import format_seconds

__all__ = [
    "QUIET",
    "Progress",
    "Status",
    "culprit",
    "located",
    "parse_status",
    "progress_file",
    "read_progress",
    "status_table",
]

QUIET = 2.0
"""a rank writes twice a second what it does; one that has not for so many seconds is stopped or gone"""
_WORD = struct.Struct("<qqd")
"""the action (0: none, see `_code`), the step, and since when"""
_TEXT = 96
_SIZE = _WORD.size + _TEXT


def progress_file(folder: Path, rank: int) -> Path:
    """Where a rank of `bapipe run` keeps what it is at."""
    return folder / f"progress-{rank}"


class Progress:
    """What a rank is at, in memory that a file shares, so that it outlives the rank. A note takes under 1 µs."""

    def __init__(self, path: Path | None) -> None:
        """Without a path it is only remembered."""
        self.path = path
        self._codes: dict[int, tuple[Action, int]] = {}
        """by the identity of an action: a schedule's order has each many times"""
        memory: mmap.mmap | bytearray = bytearray(_SIZE)
        if path is not None:
            path.write_bytes(bytes(_SIZE))
            with path.open("r+b") as file:
                memory = mmap.mmap(file.fileno(), _SIZE)
        self._memory = memoryview(memory)
        # Stores into these are the quickest that Python has.
        self._numbers = self._memory[:16].cast("q")
        self._since = self._memory[16:24].cast("d")
        self.note("starting up")

    def begin(self, step: int) -> None:
        """A new global batch."""
        self.step = step
        self.note(f"before step {step}")

    @property
    def step(self) -> int:
        """The global batch."""
        return self._numbers[1]

    @step.setter
    def step(self, step: int) -> None:
        self._numbers[1] = step

    def note(self, text: str) -> None:
        """Something other than an action."""
        self._memory[_WORD.size :] = text.encode()[:_TEXT].ljust(_TEXT)
        self._numbers[0] = 0
        self._since[0] = time.time()

    def note_action(self, action: Action) -> None:
        """The action that begins, or waits for its input."""
        known = self._codes.get(id(action))
        if known is None or known[0] is not action:
            known = self._codes[id(action)] = (action, _code(action))
        self._numbers[0] = known[1]
        self._since[0] = time.time()

    @property
    def current(self) -> tuple[str, int | None, float]:
        """What the rank is at, of which stage if it is an action, and since when."""
        return _read(bytes(self._memory))


def read_progress(path: Path) -> tuple[str, int | None, float] | None:
    """`Progress.current` of another rank of this machine, alive or not; None if it cannot be had."""
    try:
        # Whoever names it may name anything: a link, a pipe without an end, a file of others.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_size != _SIZE:
            return None
        return _read(os.read(handle, _SIZE))
    except (OSError, ValueError, struct.error):
        return None
    finally:
        os.close(handle)


def _code(action: Action) -> int:
    """The action as one number: micro-batch + 1 (0: none), stage, kind + 1."""
    microbatch = 0 if action.microbatch is None else action.microbatch + 1
    return microbatch << 32 | action.stage << 8 | int(action.kind) + 1


def _read(content: bytes) -> tuple[str, int | None, float]:
    code, step, since = _WORD.unpack_from(content)
    if not code:
        return content[_WORD.size :].decode(errors="replace").rstrip(), None, since
    microbatch, stage, kind = code >> 32, code >> 8 & 0xFFFFFF, code & 0xFF
    action = Action(stage, Kind(kind - 1), microbatch - 1 if microbatch else None)
    return f"action {action} of step {step}", stage, since


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What a rank last said of itself."""

    rank: int
    host: str
    machine: str
    """the same on ranks that see each other's processes"""
    process: str
    """number and start of its process"""
    stages: tuple[int, ...]
    at: str
    """action of a step, or what it does otherwise"""
    stage: int | None = None
    """of the action"""
    waits: str = ""
    """what it waits for, in words; empty: it does not"""
    waits_rank: int | None = None
    """which rank it waits for, if one"""
    since: float
    """when that began, seconds since the epoch"""
    said: float
    """when it said so"""
    progress: str = ""
    """the file with the action that it is at"""


def parse_status(said: str, rank: int, *, ranks: int) -> Status | None:
    """What a rank, one of so many, said of itself, as JSON; None if it is something else."""
    try:
        status = decode(Status, json.loads(said), where=f"rank {rank}")
    except (BaPipeError, ValueError, RecursionError):
        return None
    known = status.waits_rank is None or 0 <= status.waits_rank < ranks
    return status if status.rank == rank and known else None


def located(status: Status | None, rank: int, *, stages: Sequence[int] = (), host: str = "") -> str:
    """The rank, its host, stage and action."""
    at, stage = "", None
    if status is not None:
        host, stages, at, stage = status.host, status.stages, status.at, status.stage
    names = [str(stage)] if stage is not None else [str(item) for item in stages]
    parts = [f"rank {rank} on {host}" if host else f"rank {rank}"]
    if names:
        parts.append(f"stage{'s' if len(names) > 1 else ''} {' and '.join(names)}")
    return ", ".join([*parts, at] if at else parts)


def culprit(statuses: Mapping[int, Status], start: int | None, *, now: float) -> int | None:
    """The rank that all wait for: from `start` along who waits for whom, to one that is silent or waits for none.

    Without a start, and where that leads to a rank that waits for all others, the rank that is silent, or the only
    one that waits for nobody: a sum that some ranks have may not have reached the others. None if there is none.
    """
    if start is None:
        silent = [rank for rank, status in statuses.items() if now - status.said > QUIET]
        busy = [rank for rank, status in statuses.items() if not status.waits]
        found = silent or busy
        return found[0] if len(found) == 1 else None
    rank, seen = start, {start}
    while rank in statuses and now - statuses[rank].said <= QUIET:
        after = statuses[rank].waits_rank
        if after is None and statuses[rank].waits:
            awaited = culprit(statuses, None, now=now)
            return rank if awaited is None else awaited
        if after is None or after in seen:
            break
        rank = after
        seen.add(rank)
    return rank


def status_table(statuses: Mapping[int, Status], *, now: float) -> str:
    """What every rank is at and waits for, a line each."""
    rows = [("rank", "stage", "host", "at", "waits for", "for", "heard")]
    for rank, status in sorted(statuses.items()):
        quiet = now - status.said
        rows.append(
            (
                str(rank),
                ",".join(str(stage) for stage in status.stages),
                status.host,
                status.at,
                "not known" if quiet > QUIET else status.waits or "nothing",
                format_seconds(max(0.0, now - status.since)),
                f"{format_seconds(quiet)} ago" if quiet > QUIET else "now",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
