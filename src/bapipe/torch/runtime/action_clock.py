"""Clocks for what a rank does: the host's, or CUDA events where the device runs behind the host."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch

__all__ = ["QUEUED", "ActionClock", "CudaActionClock", "HostActionClock", "UntimedClock", "clock_for"]

QUEUED = 2
"""actions that the host may have queued on a GPU that has not done them yet: the GPU is then never without work

With more, a copy that carries a result to the next rank waits behind them where streams share a hardware queue.
On slices of one GPU that held up the first messages of a global batch by several forwards.
"""


class ActionClock(Protocol):
    """Marks points of time cheaply; their times are known after `times`."""

    traces: bool
    """whether it takes times at all; where not, marks are None and `times` is not called"""

    def start(self) -> None:
        """A global batch begins."""

    def mark(self) -> Any:
        """Now, as the device will see it."""

    def begin_action(self) -> Any:
        """A mark where an action begins; waits first until the device has fewer than `QUEUED` of them to do."""

    def end_action(self) -> Any:
        """A mark where it ends."""

    def times(self, marks: Sequence[Any]) -> list[float]:
        """The marks in seconds of the host's `time.perf_counter`; waits for the device."""


class HostActionClock:
    """For devices that have done the work when the call returns."""

    traces = True
    mark = staticmethod(time.perf_counter)
    begin_action = staticmethod(time.perf_counter)
    end_action = staticmethod(time.perf_counter)

    def start(self) -> None:
        """Nothing to do."""

    def times(self, marks: Sequence[Any]) -> list[float]:
        return list(marks)


class CudaActionClock:
    """Events on the current stream, put on the host's clock by one that the host has waited for."""

    traces = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._used = 0
        self._ends: deque[torch.cuda.Event] = deque(maxlen=QUEUED)
        """of the last actions"""

    def start(self) -> None:
        self._used = 0
        self._ends.clear()

    def mark(self) -> torch.cuda.Event:
        if self._used == len(self._events):
            # `blocking` lets the host sleep instead of spin while it waits.
            made = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
            self._events.append(made)
        event = self._events[self._used]
        self._used += 1
        event.record(torch.cuda.current_stream(self._device))
        return event

    def begin_action(self) -> torch.cuda.Event:
        if len(self._ends) == QUEUED:
            self._ends[0].synchronize()
        return self.mark()

    def end_action(self) -> torch.cuda.Event:
        event = self.mark()
        self._ends.append(event)
        return event

    def times(self, marks: Sequence[Any]) -> list[float]:
        last = self.mark()
        last.synchronize()
        now = time.perf_counter()
        return [now - mark.elapsed_time(last) / 1e3 for mark in marks]


class UntimedClock:
    """Takes no times. On CUDA the host still waits so that no more than `QUEUED` actions are queued; the events
    that it waits for carry no time."""

    traces = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events = [_untimed_event() for _ in range(QUEUED)] if device.type == "cuda" else []
        self._ended = 0
        """actions of this global batch"""

    def start(self) -> None:
        self._ended = 0

    def mark(self) -> None:
        """Nothing."""

    def begin_action(self) -> None:
        if self._events and self._ended >= QUEUED:
            self._events[self._ended % QUEUED].synchronize()

    def end_action(self) -> None:
        if self._events:
            self._events[self._ended % QUEUED].record(torch.cuda.current_stream(self._device))
            self._ended += 1

    def times(self, marks: Sequence[Any]) -> list[float]:
        raise AssertionError(f"{len(marks)} times were asked of a clock that takes none")


def _untimed_event() -> torch.cuda.Event:
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]


def clock_for(device: torch.device, *, trace: bool = True) -> ActionClock:
    """The clock of a device; without `trace` one that takes no times."""
    if not trace:
        return UntimedClock(device)
    return CudaActionClock(device) if device.type == "cuda" else HostActionClock()
