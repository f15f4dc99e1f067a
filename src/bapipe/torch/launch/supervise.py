"""The ranks of a local run under their launcher: what stops the one stops the others, and nothing stays.

SIGTERM, SIGHUP and SIGINT are passed on to the ranks; what has not ended 30 s later
(TORCH_ELASTIC_SHUTDOWN_TIMEOUT, which torchrun reads too), or at a second SIGTERM or SIGINT, is killed. Where a
rank fails the others are told to end by SIGTERM, after a moment in which they can find out and say so themselves.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType

from bapipe.torch.health.rank_end import RankEnd
from bapipe.torch.launch.rank_process import RankProcess
from bapipe.torch.launch.shared_memory import remove_left_files

__all__ = ["Ended", "grace", "supervise"]

_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_SAME = 1.0
"""seconds; `timeout` and others send a signal to the process and to its group: the second one is no other"""
_GRACE = 30.0
"""seconds that ranks have to end, unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT says otherwise"""
_MOMENT = 0.5
"""seconds after a rank failed until the others are told"""
_LOOK = 0.5
"""seconds between two looks whether a rank is stopped"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a local run ended."""

    ranks: tuple[RankEnd, ...]
    """all of them, in the order in which they ended"""
    stopped_by: signal.Signals | None
    """the signal that stopped this process; None: it ended by itself"""
    killed: bool
    """whether ranks had to be killed after that"""

    @property
    def failed(self) -> tuple[RankEnd, ...]:
        """Ranks whose exit code was not 0."""
        return tuple(end for end in self.ranks if end.code)


def grace() -> float:
    """Seconds after a signal until what is left of a run is killed."""
    try:
        return max(0.0, float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _GRACE)))
    except ValueError:
        return _GRACE


def supervise(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]],
    *,
    labelled: bool = True,
    patience: float | None = None,
) -> Ended:
    """Run one process per (command, environment) to its end; the number of each is its place.

    With `labelled` what ranks write on standard error is passed on with their number. With `patience` a rank that
    a signal has stopped for so many seconds is killed: its peers notice one that does not answer, unless they are
    stopped, too.
    """
    over: queue.SimpleQueue[RankProcess] = queue.SimpleQueue()
    ranks: list[RankProcess] = []
    with _stopping() as stop:
        try:
            for rank, (command, environment) in enumerate(commands):
                ranks.append(RankProcess(rank, command, environment, labelled=labelled, ended=over))
            stop.begin(ranks)
            ended = _wait(ranks, over, stop, patience)
        except BaseException:
            for process in ranks:
                process.kill()
                process.reap()
            raise
        finally:
            remove_left_files([process.number for process in ranks])
    return Ended(ranks=ended, stopped_by=stop.signal, killed=stop.killed)


def _wait(
    ranks: Sequence[RankProcess], over: queue.SimpleQueue[RankProcess], stop: _Stop, patience: float | None
) -> tuple[RankEnd, ...]:
    ended: list[RankEnd] = []
    failed: float | None = None
    looks = _Looks(patience)
    while len(ended) < len(ranks):
        with contextlib.suppress(queue.Empty):
            ended.append(over.get(timeout=_LOOK).reap())
        now = time.monotonic()
        if failed is None and any(end.code for end in ended):
            failed = now
        if failed is not None and now - failed >= _MOMENT and stop.signal is None:
            stop.tell(signal.SIGTERM)
        stop.look()
        looks.look([rank for rank in ranks if rank.lives])
    return tuple(sorted(ended, key=lambda end: end.at))


class _Looks:
    """Ranks that are found stopped, look after look."""

    def __init__(self, patience: float | None) -> None:
        self._patience = patience
        self._since: dict[int, float] = {}
        self._last = time.monotonic()

    def look(self, ranks: Sequence[RankProcess]) -> None:
        now = time.monotonic()
        if now - self._last > 4 * _LOOK:
            self._since.clear()  # this process itself was stopped, or could not run
        self._last = now
        if self._patience is None:
            return
        stopped = [rank for rank in ranks if rank.is_stopped]
        self._since = {rank.rank: self._since.get(rank.rank, now) for rank in stopped}
        if any(now - since > self._patience for since in self._since.values()):
            for rank in stopped:
                rank.stopped = max(now - self._since[rank.rank], _LOOK)
                rank.kill()


class _Stop:
    """What happens to the ranks when a signal stops this process, or a rank fails."""

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self.killed = False
        self._ranks: Sequence[RankProcess] = ()
        self._told: float | None = None
        self._at = 0.0

    def handle(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._at = signal.Signals(number), time.monotonic()
            self._told = None
            self.tell(self.signal)
        elif number != signal.SIGHUP and time.monotonic() - self._at > _SAME:
            self._kill()

    def begin(self, ranks: Sequence[RankProcess]) -> None:
        self._ranks = ranks
        if self.signal is not None:
            self._told = None
            self.tell(self.signal)

    def tell(self, number: int) -> None:
        """Have the ranks end, once."""
        if self._told is None:
            self._told = time.monotonic()
            for rank in self._ranks:
                rank.tell(number)

    def look(self) -> None:
        """Kill what should have ended by now; one that was stopped since cannot."""
        if self._told is None:
            return
        late = time.monotonic() - self._told > grace()
        for rank in self._ranks:
            if rank.lives and (late or rank.is_stopped):
                self.killed = self.killed or self.signal is not None
                rank.kill()

    def _kill(self) -> None:
        for rank in self._ranks:
            if rank.lives:
                self.killed = True
                rank.kill()


@contextlib.contextmanager
def _stopping() -> Iterator[_Stop]:
    """Signals that would end this process are heard instead, if this is the main thread; those that it ignores, as
    under nohup, or handles itself stay as they are."""
    stop, before = _Stop(), {}
    if threading.current_thread() is threading.main_thread():
        usual = (signal.SIG_DFL, signal.default_int_handler)
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        before = {number: handler for number, handler in before.items() if handler in usual}
    for number in before:
        signal.signal(number, stop.handle)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
