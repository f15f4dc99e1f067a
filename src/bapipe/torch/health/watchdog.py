"""Every rank watches the others: one that fails ends all of them within seconds, and each says on one line why.

Twice a second a rank writes into the store of the run (`bapipe.torch.health.rank_store`) what it does and whom it
waits for, and looks whether any rank has failed. A rank that fails, or loses a neighbour, leaves word there
first. A rank that is killed says nothing: who lost it names it, with the last that was heard of it, which on one
machine is exact (`bapipe.torch.health.rank_status.Progress`).

    rank 1 is killed     rank 0, rank 2   LinkError at once; the first one leaves word
                         rank 3           reads it within 0.2 s, even while it computes
    rank 1 is stopped    rank 0, rank 2   LinkError after the timeout; who waits for whom leads to rank 1
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from bapipe.io.files import dump_json
from bapipe.io.run_folder import RUN_FOLDER, RUN_ID
from bapipe.torch.comm import LinkError
from bapipe.torch.health.failure import Failure, RunError
from bapipe.torch.health.parent_death import watch_parent
from bapipe.torch.health.process_exit import (
    FAILED,
    clear_files,
    hide_reported_errors,
    leave,
    log_failure,
    own_file,
)
from bapipe.torch.health.processes import end_process, on_termination, own_machine, own_process
from bapipe.torch.health.rank_notes import GRACE, RankNotes
from bapipe.torch.health.rank_status import (
    QUIET,
    Progress,
    Status,
    culprit,
    located,
    status_table,
)
from bapipe.torch.health.rank_store import RankStore, connect_store
from bapipe.torch.stage.error_context import ActionError, one_line

if TYPE_CHECKING:
    from bapipe.torch.runtime.executor import Executor
    from bapipe.torch.runtime.torch_executor import TorchExecutor

__all__ = ["Watch"]

_logger = logging.getLogger(__name__)
_LOOK = 0.2
"""seconds between two looks at the store; at every second one it writes what this rank does"""
_LATE = 1.0
"""seconds after the timeout in which a rank that waits should have found out by itself"""
_LAST_WORDS = 3.0
"""seconds that a rank which has failed may take to end by itself"""


class Watch:
    """Watches the other ranks; made on every rank once there is a process group."""

    def __init__(
        self,
        stages: Sequence[Sequence[int]],
        *,
        timeout: float,
        progress: Progress | None = None,
        report: Callable[[Failure, int], None] = log_failure,
        signals: Sequence[int] = (signal.SIGTERM,),
    ) -> None:
        """`stages` are those of every rank. `report` is called where another rank's failure ends this one.

        Without a store to meet at (see `connect_store`) a rank knows of its neighbours only. `signals` end this
        rank, and are said to do so where they come from a failure; see `stops_later`. A rank ends with its
        launcher.
        """
        self.rank = dist.get_rank()
        self.stops_later = False
        """whether a signal (but SIGINT) is only noted, in `stop_signal`, for the training to end after its step"""
        self.stop_signal = 0
        """the signal that is to end the run; 0: none"""
        self._host, self._machine, self._process = socket.gethostname(), own_machine(), own_process()
        self.progress = Progress(own_file(self._process)) if progress is None else progress
        self._stages = [tuple(item) for item in stages]
        self._timeout = timeout
        self._report = report
        self._executor: weakref.ref[Executor | TorchExecutor] | None = None
        self._meeting = ""
        self._waiting: tuple[object, float] = (None, 0.0)
        """what is waited for, and since when"""
        self._reported = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        store = connect_store()
        self._notes = RankNotes(store, ranks=len(self._stages), status=self._status, own_file=self.progress.path)
        looking = None if store is None else connect_store()
        if looking is not None:
            hide_reported_errors()
            with contextlib.suppress(RuntimeError):  # now, should this process end before the thread runs
                looking.write(f"at/{self.rank}", dump_json(self._status()))
            self._thread = threading.Thread(target=self._look, args=(looking,), name="bapipe watch", daemon=True)
            self._thread.start()
        if looking is not None or len(signals) > 1:
            on_termination(self._terminated, signals)
        if RUN_ID in os.environ:
            watch_parent(self._abandoned)
        atexit.register(self.close)

    def close(self) -> None:
        """Stop watching: the run is over."""
        atexit.unregister(self.close)
        self._stop.set()
        # Python must not end while the thread is within torch's client: C++ would abort the process.
        if self._thread is not None:
            self._thread.join()
        clear_files()

    def follow(self, executor: Executor | TorchExecutor) -> None:
        """Whose waits the others come to know of."""
        self._executor = weakref.ref(executor)

    @contextlib.contextmanager
    def meeting(self, what: str) -> Iterator[None]:
        """All ranks, or all replicas, do this together; each waits for the last one."""
        self.progress.note(f"{what}, step {self.progress.step}")
        self._meeting = what
        # What raises within leaves it set: that is what the rank is at.
        yield
        self._meeting = ""

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """An action or a link that fails within is a RunError, and the other ranks come to know of it.

        Whatever else is raised passes, and is this rank's last word should it end.
        """
        try:
            yield
        except (ActionError, LinkError) as error:
            failure = self._fail(error)
            raise RunError(failure, reported=failure.lost or failure.rank != self.rank) from error
        except RunError:
            raise
        except BaseException as error:
            self._notes.write_last_words(self.rank, one_line(error))
            raise

    def _fail(self, error: ActionError | LinkError) -> Failure:
        cause = error.cause if isinstance(error, ActionError) else error
        if not isinstance(cause, LinkError):
            assert isinstance(error, ActionError)
            own = self._failure(self.rank, self._status(), error.reason, lost=False)
            self._notes.agree(own)
            if len(self._stages) > 1:
                FAILED.append(own)
            return own
        failure = self._notes.failure() or (
            self._give_up(cause.peer) if cause.late else self._notes.agree(self._lost(cause))
        )
        self._report_once(failure)
        if failure.lost and failure.by == self.rank:
            self._notes.remove_file_of(failure.rank)
        return failure

    def _failure(
        self, rank: int, status: Status | None, reason: str, *, lost: bool = True, table: str = ""
    ) -> Failure:
        stages = self._stages[rank] if rank < len(self._stages) else ()
        where = located(status, rank, stages=stages)
        return Failure(rank=rank, by=self.rank, where=where, reason=reason, lost=lost, table=table, at=time.time())

    def _lost(self, cause: LinkError) -> Failure:
        """A neighbour's end is broken off: either it has ended, or it gave up on another one."""
        rank, patience = cause.peer, time.monotonic() + GRACE
        while time.monotonic() < patience:
            known = self._notes.failure()
            if known is not None:
                return known
            ended = self._notes.ended()
            if rank in ended or (rank is None and ended):
                rank = ended[0] if rank is None else rank
                break
            time.sleep(0.02)
        if rank is None:
            rank = self._notes.silent()
        if rank is None:
            return self._failure(self.rank, self._status(), str(cause))
        at = self.progress.current[0]
        words = self._notes.last_words(rank)
        reason = words or f"has ended or cannot be reached; rank {self.rank} noticed at {at}"
        return self._failure(rank, self._notes.statuses().get(rank), reason)

    def _give_up(self, peer: int | None) -> Failure:
        """A rank did not answer in time. Those that are stopped are ended, if they are here: torchrun would wait
        30 s for them."""
        seen, now = self._notes.statuses(), time.time()
        silent = [rank for rank, status in sorted(seen.items()) if now - status.said > QUIET]
        rank = culprit(seen, peer, now=now)
        if rank is None and silent:
            rank = silent[0]
        failure = self._notes.agree(self._late(rank, seen, now, also=[item for item in silent if item != rank]))
        for item in silent:
            if seen[item].machine == self._machine:
                end_process(seen[item].process)
        return failure

    def _late(
        self, rank: int | None, seen: Mapping[int, Status], now: float, *, also: Sequence[int] = ()
    ) -> Failure:
        table = status_table(seen, now=now) if seen else ""
        if rank is None or rank == self.rank:
            return self._failure(
                self.rank, self._status(), f"another rank did not answer for {self._timeout:g} s", table=table
            )
        nor = "nor do ranks" if len(also) > 1 else "nor does rank"
        others = f", {nor} {' and '.join(map(str, also))}" if also else ""
        reason = f"does not answer{others}; rank {self.rank} waited {self._timeout:g} s"
        return self._failure(rank, seen.get(rank), reason, table=table)

    def _status(self) -> Status:
        at, stage, since = self.progress.current
        executor = None if self._executor is None else self._executor()
        waits, waits_rank = (f"all ranks ({self._meeting})", None) if self._meeting else ("", None)
        channel = None if executor is None or self._meeting else executor.waiting
        if executor is not None and channel is not None and executor.current is not None:
            number = executor.current.microbatch
            maker = f"{channel.boundary}F{number}" if channel.onward else f"{channel.boundary + 1}B{number}"
            waits_rank = channel.from_rank if channel.to_rank == self.rank else channel.to_rank
            waits = f"rank {waits_rank} ({maker if channel.to_rank == self.rank else f'to take {maker}'})"
        key = (at, waits) if waits else None
        if key != self._waiting[0]:
            self._waiting = (key, time.time())
        return Status(
            rank=self.rank,
            host=self._host,
            machine=self._machine,
            process=self._process,
            stages=self._stages[self.rank],
            at=at,
            stage=stage,
            waits=waits,
            waits_rank=waits_rank,
            since=since,
            said=time.time(),
            progress="" if self.progress.path is None else str(self.progress.path),
        )

    def _report_once(self, failure: Failure) -> None:
        """Report the failure once, whichever thread comes first; the process is to end."""
        if self._reported.acquire(blocking=False):
            self._report(failure, self.rank)
            FAILED.append(failure)

    def _look(self, board: RankStore) -> None:
        """The thread: write, look, and end the process when another rank has failed."""
        turn = 0
        while not self._stop.wait(_LOOK):
            if self._executor is not None and self._executor() is None:
                return
            try:
                status = self._status()
                if turn % 2 == 0:
                    board.write(f"at/{self.rank}", dump_json(status))
                turn += 1
                said = board.read("failure")
            except RuntimeError:
                # The store has gone with its host; ranks there are neighbours of ours or of ranks that will
                # report.
                return
            known = None if said is None else self._notes.decoded(said)
            if known is None and self._overdue():
                known = self._give_up(status.waits_rank)
            if known is not None:
                self._end(known)
                return

    def _overdue(self) -> bool:
        """Whether the main thread waits for longer than it may: the user's process group has its own timeout."""
        key, since = self._waiting
        return key is not None and time.time() - since > self._timeout + _LATE

    def _end(self, failure: Failure) -> None:
        """End this process; one that failed of itself, or has noticed by itself, may take a moment to do so."""
        if failure.by == self.rank and not failure.lost:
            return
        if FAILED or failure.by == self.rank:
            self._stop.wait(_LAST_WORDS)
        self._report_once(failure)
        leave(failure.code)

    def _terminated(self, number: int) -> None:
        """A signal: where it is because of a failure, say so."""
        if number == signal.SIGINT:
            leave(128 + number)
        if self.stop_signal:
            return  # torchrun, and who stops all of a job's processes, send it once more
        patience = time.monotonic() + GRACE
        failure: Failure | None = FAILED[0] if FAILED else None
        while failure is None and time.monotonic() < patience:
            failure = self._notes.failure()
            if failure is None:
                time.sleep(0.05)
        if failure is None:
            ended = self._notes.ended()
            spoke = [
                rank for rank in range(len(self._stages)) if rank != self.rank and self._notes.last_words(rank)
            ]
            rank = next(iter(ended or spoke), None)
            if rank is not None:
                failure = self._failure(
                    rank, self._notes.statuses().get(rank), self._notes.last_words(rank) or "has ended"
                )
        if failure is not None:
            self._end(failure)
            time.sleep(_LAST_WORDS)
        elif self.stops_later:
            self.stop_signal = number
            return
        # Nobody failed, or it was this rank, which had the time to say so: end as shells say it of this signal.
        self._notes.write_last_words(self.rank, f"was stopped by {signal.Signals(number).name}")
        leave(128 + number)

    def _abandoned(self) -> None:
        """torchrun, or bapipe launch, has ended without its ranks, and with it the store."""
        started_by = "bapipe" if RUN_FOLDER in os.environ else "torchrun"
        _logger.error("rank %d ends, because %s, which started it, has ended", self.rank, started_by)
        leave(1)
