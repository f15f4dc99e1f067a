"""What the ranks of a run leave for each other in the store: what each does, its last words, and the failure that
ends the run."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bapipe.io.files import dump_json
from bapipe.torch.health.failure import Failure, parse_failure
from bapipe.torch.health.process_exit import PREFIX, is_file_of
from bapipe.torch.health.processes import has_ended
from bapipe.torch.health.rank_status import QUIET, Status, parse_status, read_progress
from bapipe.torch.health.rank_store import RankStore

__all__ = ["GRACE", "RankNotes"]

GRACE = 1.0
"""seconds to wait for who knows better, where a rank that seems lost may only have given up on another one"""


class RankNotes:
    """One rank's view of the notes. Without a store, or once its host is gone, there are its own only."""

    def __init__(
        self, store: RankStore | None, *, ranks: int, status: Callable[[], Status], own_file: Path | None
    ) -> None:
        """`status` makes this rank's own; `own_file` is the file with its progress."""
        self._store = store
        self._ranks = ranks
        self._status = status
        self._own_file = own_file

    def statuses(self) -> dict[int, Status]:
        """What the ranks last wrote; of those on this machine what they do now."""
        own = self._status()
        found = {own.rank: own}
        with contextlib.suppress(RuntimeError):
            for rank in range(self._ranks):
                text = None if rank == own.rank or self._store is None else self._store.read(f"at/{rank}")
                status = None if text is None else parse_status(text, rank, ranks=self._ranks)
                if status is not None:
                    found[rank] = self._exact(status, own)
        return found

    def _exact(self, status: Status, own: Status) -> Status:
        if not self._is_here(status, own):
            return status
        known = read_progress(Path(status.progress))
        if known is None or known[0] == status.at:
            return status
        return replace(status, at=known[0], stage=known[1], since=known[2], waits="", waits_rank=None)

    def _is_here(self, status: Status, own: Status) -> bool:
        """Whether the file with what a rank does can be read from here, and is that rank's."""
        return status.machine == own.machine and is_file_of(status, self._own_file)

    def ended(self) -> list[int]:
        """Ranks of this machine whose process is no more."""
        machine = self._status().machine
        return [
            rank
            for rank, status in self.statuses().items()
            if status.machine == machine and has_ended(status.process)
        ]

    def silent(self) -> int | None:
        """The rank, on another machine, that no longer writes; waits until it is the only one."""
        patience = time.monotonic() + QUIET
        while time.monotonic() < patience:
            time.sleep(0.1)
            now = time.time()
            silent = [rank for rank, status in self.statuses().items() if now - status.said > QUIET]
            if silent:
                return silent[0]
        return None

    def write_last_words(self, rank: int, words: str) -> None:
        """Why this rank ends, should it."""
        with contextlib.suppress(RuntimeError):
            if self._store is not None:
                self._store.write(f"words/{rank}", words)

    def last_words(self, rank: int) -> str:
        """Why a rank has ended, if it could say so."""
        with contextlib.suppress(RuntimeError):
            return (None if self._store is None else self._store.read(f"words/{rank}")) or ""
        return ""

    def failure(self) -> Failure | None:
        """The failure that ended the run, if there was one."""
        with contextlib.suppress(RuntimeError):
            text = None if self._store is None else self._store.read("failure")
            return None if text is None else self.decoded(text)
        return None

    def agree(self, failure: Failure) -> Failure:
        """Write the failure, unless another is there already: the first one counts on all ranks."""
        with contextlib.suppress(RuntimeError):
            if self._store is not None:
                return self.decoded(self._store.first("failure", dump_json(failure)))
        return failure

    def decoded(self, text: str) -> Failure:
        """A failure that some rank wrote."""
        return parse_failure(text, ranks=self._ranks)

    def remove_file_of(self, lost: int) -> None:
        """A rank that was killed could not remove the file that `own_file` had made for it."""
        own, status = self._status(), self.statuses().get(lost)
        if status is None or status.rank == own.rank or not self._is_here(status, own):
            return
        path, patience = Path(status.progress), time.monotonic() + GRACE
        if not path.name.startswith(PREFIX):
            return  # the launcher's to remove
        while not has_ended(status.process) and time.monotonic() < patience:
            time.sleep(0.02)
        if has_ended(status.process) and read_progress(path) is not None:
            path.unlink(missing_ok=True)
