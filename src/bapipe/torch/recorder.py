"""Clocks for what a rank does: the host's, or CUDA events where the device runs behind the host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch

__all__ = ["Clock", "CudaClock", "HostClock", "clock_for"]


class Clock(Protocol):
    """Marks points of time cheaply; their times are known after `times`."""

    def start(self) -> None:
        """A mini-batch begins."""

    def mark(self) -> Any:
        """Now, as the device will see it."""

    def wait(self, mark: Any) -> None:
        """Until the device has come to the mark."""

    def times(self, marks: Sequence[Any]) -> list[float]:
        """The marks in seconds of the host's `time.perf_counter`; waits for the device."""


class HostClock:
    """For devices that have done the work when the call returns."""

    mark = staticmethod(time.perf_counter)

    def start(self) -> None:
        """Nothing to do."""

    def wait(self, mark: Any) -> None:
        """Nothing to do."""

    def times(self, marks: Sequence[Any]) -> list[float]:
        return list(marks)


class CudaClock:
    """Events on the current stream, put on the host's clock by one that the host has waited for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._used = 0

    def start(self) -> None:
        self._used = 0

    def mark(self) -> torch.cuda.Event:
        if self._used == len(self._events):
            # `blocking` lets the host sleep instead of spin while it waits.
            made = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
            self._events.append(made)
        event = self._events[self._used]
        self._used += 1
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def times(self, marks: Sequence[Any]) -> list[float]:
        last = self.mark()
        last.synchronize()
        now = time.perf_counter()
        return [now - mark.elapsed_time(last) / 1e3 for mark in marks]


def clock_for(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else HostClock()
