"""The two ends of a channel: receives posted ahead of need, sends kept until they must have been delivered."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from bapipe.schedule.channel_window import AHEAD, WINDOW
from bapipe.torch.comm.channel import Message, P2PChannel, Transport

__all__ = ["Inbox", "Outbox"]


class Inbox:
    """The receiving end: micro-batches come in the order in which the sender makes them.

    Holds at most `AHEAD` messages, and beyond them only what comes before its turn.
    """

    def __init__(self, transport: Transport, channel: P2PChannel) -> None:
        self.channel = channel
        self._transport = transport
        self._coming: deque[tuple[int, Callable[[], tuple[Tensor, ...]]]] = deque()
        self._early: dict[int, tuple[Tensor, ...]] = {}
        self._messages: Mapping[int, Message] = {}
        self._next: Iterator[int] = iter(())
        self.peak = 0
        """most messages held at once, posted or early"""

    def begin(self, order: Sequence[int], messages: Mapping[int, Message]) -> None:
        """A global batch begins: post the first receives of the micro-batches in `order`."""
        assert self.idle, "the last global batch was not received to its end"
        self._messages = messages
        self._next = iter(order)
        self._post(AHEAD)

    def _post(self, count: int) -> None:
        for microbatch in itertools.islice(self._next, count):
            self._coming.append((microbatch, self._transport.receive(self.channel, self._messages[microbatch])))
        self.peak = max(self.peak, len(self._coming) + len(self._early))

    def take(self, microbatch: int) -> tuple[Tensor, ...]:
        """That micro-batch's tensors; waits until they are there."""
        while microbatch not in self._early:
            coming, wait = self._coming.popleft()
            self._early[coming] = wait()
            self._post(1)
        return self._early.pop(microbatch)

    @property
    def idle(self) -> bool:
        return not self._coming and not self._early


class Outbox:
    """The sending end.

    An activation that will be answered by its gradient is kept until `release`, which is called when that has
    come: it was delivered then. Of what has no answer a window is kept and the oldest waited for.
    """

    def __init__(self, transport: Transport, channel: P2PChannel) -> None:
        self.channel = channel
        self._transport = transport
        self._answered = False
        self._under_way: dict[int, Callable[[], None]] = {}
        self.peak = 0
        """most messages under way at once"""

    def begin(self, *, answered: bool) -> None:
        """A global batch begins, in which messages are answered or not."""
        assert self.idle, "the last global batch was not sent to its end"
        self._answered = answered

    def send(self, microbatch: int, values: Sequence[Tensor]) -> None:
        """Hand tensors over; returns at once unless the window is full."""
        self._under_way[microbatch] = self._transport.send(self.channel, values)
        self.peak = max(self.peak, len(self._under_way))
        while not self._answered and len(self._under_way) > WINDOW:
            self.release(next(iter(self._under_way)))

    def release(self, microbatch: int) -> None:
        """Wait until it is delivered, then let go of it."""
        self._under_way[microbatch]()
        del self._under_way[microbatch]

    def flush(self) -> None:
        """Wait for all that is under way."""
        for microbatch in list(self._under_way):
            self.release(microbatch)

    @property
    def idle(self) -> bool:
        return not self._under_way
