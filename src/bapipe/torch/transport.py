"""Point-to-point links between ranks over gloo.

gloo's send is a rendezvous: it ends when the peer has posted its receive. So receives are posted before they are
needed, sends never block the compute, and a tensor that is being sent is kept until it must have been delivered:
`Work.is_completed()` stays false until `wait()`, so delivery is inferred (see `Outbox`).
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.errors import BaPipeError
from bapipe.torch.split import TensorShape

__all__ = ["BACKWARD", "FORWARD", "Inbox", "LinkError", "Outbox", "clock_offset", "guarded", "sum_over_ranks"]

FORWARD, BACKWARD = 1, 2
"""the tag of each direction"""
AHEAD = 2
"""receives posted before they are needed, per direction"""
WINDOW = 3
"""errors that may be under way before the oldest is waited for"""
_ROUNDS = 16


class LinkError(BaPipeError):
    """The peer has gone or does not answer."""

    def __init__(self, peer: int | None, error: BaseException) -> None:
        """`peer` is None where any other rank may be the one."""
        text = (str(error).splitlines() or [""])[0].lower()
        self.peer = peer
        late = "timed out" in text or "timeout" in text
        what = "did not answer in time" if late else "has ended or cannot be reached"
        super().__init__(f"{'another rank' if peer is None else f'rank {peer}'} {what}")


@contextlib.contextmanager
def guarded(peer: int | None) -> Iterator[None]:
    """What torch.distributed raises within is a LinkError."""
    try:
        yield
    except RuntimeError as error:
        raise LinkError(peer, error) from error


def _posted(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the group"
    return work


class Inbox:
    """One direction of one link, at its receiving end: micro-batches come in the order in which they are made.

    Holds at most `AHEAD` buffers, and beyond them only what comes before its turn.
    """

    def __init__(self, peer: int, tag: int, order: Sequence[int], shapes: Mapping[int, TensorShape]) -> None:
        self.peer = peer
        self._tag = tag
        self._order = tuple(order)
        self._shapes = shapes
        self._coming: deque[tuple[int, dist.Work, Tensor]] = deque()
        self._early: dict[int, Tensor] = {}
        self._next = iter(self._order)

    def begin(self) -> None:
        """Post the first receives of a mini-batch."""
        assert self.idle, "the last mini-batch was not received to its end"
        self._next = iter(self._order)
        self._post(AHEAD)

    def _post(self, count: int) -> None:
        for microbatch in itertools.islice(self._next, count):
            buffer = self._shapes[microbatch].empty()
            with guarded(self.peer):
                work = _posted(dist.irecv(buffer, self.peer, tag=self._tag))
            self._coming.append((microbatch, work, buffer))

    def take(self, microbatch: int) -> Tensor:
        """That micro-batch's tensor; waits until it is there."""
        while microbatch not in self._early:
            coming, work, buffer = self._coming.popleft()
            with guarded(self.peer):
                work.wait()
            self._early[coming] = buffer
            self._post(1)
        return self._early.pop(microbatch)

    @property
    def idle(self) -> bool:
        return not self._coming and not self._early


class Outbox:
    """One direction of one link, at its sending end.

    An activation is kept until `release`, which is called when its error has come back: it was delivered then.
    Errors have no answer, so of them a window is kept and the oldest waited for.
    """

    def __init__(self, peer: int, tag: int, *, window: int | None = None) -> None:
        self.peer = peer
        self._tag = tag
        self._window = window
        self._under_way: dict[int, tuple[dist.Work, Tensor]] = {}

    def send(self, microbatch: int, value: Tensor) -> None:
        """Hand a tensor over; returns at once unless the window is full."""
        kept = value.contiguous()
        with guarded(self.peer):
            work = _posted(dist.isend(kept, self.peer, tag=self._tag))
        self._under_way[microbatch] = (work, kept)
        while self._window is not None and len(self._under_way) > self._window:
            self.release(next(iter(self._under_way)))

    def release(self, microbatch: int) -> None:
        """Wait until it is delivered, then let go of it."""
        work, _ = self._under_way[microbatch]
        with guarded(self.peer):
            work.wait()
        del self._under_way[microbatch]

    def flush(self) -> None:
        """Wait for all that is under way."""
        for microbatch in list(self._under_way):
            self.release(microbatch)

    @property
    def idle(self) -> bool:
        return not self._under_way


def sum_over_ranks(value: float) -> float:
    """The sum of every rank's value, once all ranks are here."""
    total = torch.tensor(value, dtype=torch.float64)
    with guarded(None):
        dist.all_reduce(total)
    return float(total)


def clock_offset(machine: str, *, clock: Callable[[], float] = time.perf_counter) -> float:
    """How far this rank's clock is ahead of rank 0's; every rank calls it at once.

    Ranks of one machine share its clock, so theirs is 0 and exact. To the others rank 0 sends its question
    several times; the quickest answer is off by at most half of its round trip.
    """
    machines: list[str] = [""] * dist.get_world_size()
    with guarded(None):
        dist.all_gather_object(machines, machine)
    rank = dist.get_rank()
    reading, offset = torch.zeros(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    for peer in range(1, dist.get_world_size()):
        if machines[peer] == machines[0] or rank not in (0, peer):
            continue
        if rank == 0:
            offset[0] = min(_ask(peer, reading, clock) for _ in range(_ROUNDS))[1]
            dist.send(offset, peer)
        else:
            for _ in range(_ROUNDS):
                dist.recv(reading, 0)
                reading[0] = clock()
                dist.send(reading, 0)
            dist.recv(offset, 0)
    return float(offset) if rank else 0.0


def _ask(peer: int, reading: Tensor, clock: Callable[[], float]) -> tuple[float, float]:
    """(round trip, how far the peer's clock is ahead)."""
    asked = clock()
    dist.send(reading, peer)
    dist.recv(reading, peer)
    answered = clock()
    return answered - asked, float(reading) - (asked + answered) / 2
