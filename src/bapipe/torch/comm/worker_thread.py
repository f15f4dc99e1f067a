"""Threads that wait for the slow half of a transfer, so that the caller never does."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from bapipe.torch.comm.channel import LinkError

__all__ = ["WorkerThread", "close_lanes", "result_of"]

T = TypeVar("T")

_PATIENCE = 5.0
"""seconds to wait for a thread that has nothing left to wait for itself"""


class WorkerThread:
    """One thread that does jobs in the order in which they are given.

    A job is called with the future that its caller waits for, and fulfils it or hands it on; what it raises goes
    into the future. A job that fails does not end the lane: the next ones find out for themselves.
    """

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[Future[Any]], None], Future[Any]] | None]
        self._jobs = queue.SimpleQueue()
        # Weak, because a future holds what came: a message that nobody holds any more must go.
        self._last: weakref.ref[Future[Any]] | None = None
        # A daemon: an exit that skips close() must end all the same.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[Future[T]], None], *, future: Future[T] | None = None) -> Future[T]:
        """Have the job done for a new future, or for the one that another lane hands on."""
        promised: Future[T] = Future() if future is None else future
        self._last = weakref.ref(promised)
        self._jobs.put((job, promised))
        return promised

    def _run(self) -> None:
        while self._one():
            pass

    def _one(self) -> bool:
        """One job; what it held is let go before the next one is waited for."""
        item = self._jobs.get()
        if item is None:
            return False
        job, future = item
        try:
            job(future)
        except BaseException as error:
            if not future.done():
                future.set_exception(error)
        return True

    @property
    def settled(self) -> bool:
        """Every job's caller has its answer."""
        last = None if self._last is None else self._last()
        return last is None or last.done()

    def finish(self) -> None:
        """Let the thread end after the jobs it has."""
        self._jobs.put(None)

    def join(self, seconds: float) -> bool:
        """Whether the thread has ended within so many seconds."""
        self._thread.join(seconds)
        return not self._thread.is_alive()


def result_of(future: Future[T], peer: int, timeout: float) -> T:
    """What the job gave; a LinkError where it takes more than `timeout` seconds from now."""
    with contextlib.suppress(TimeoutError):
        return future.result(timeout)
    raise LinkError(peer, TimeoutError(f"timed out after {timeout:g} s"))


def close_lanes(lanes: Iterable[WorkerThread], break_off: Callable[[], None]) -> None:
    """End the threads. Where one still waits for a peer, `break_off` must make that wait fail."""
    threads = list(lanes)
    for lane in threads:
        lane.finish()
    if not all(lane.settled and lane.join(_PATIENCE) for lane in threads):
        break_off()
        for lane in threads:
            lane.join(_PATIENCE)
