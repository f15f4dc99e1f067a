"""Clocks: how far the host may run ahead of a GPU, and that on a CPU an action costs one look at the time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest

torch = pytest.importorskip("torch", reason="a run's clocks need torch: pip install bapipe[torch]")

from bapipe.torch.runtime.action_clock import (  # noqa: E402
    QUEUED,
    CudaActionClock,
    HostActionClock,
    UntimedClock,
    clock_for,
)


@dataclass(eq=False)
class Event:
    """In place of a CUDA event, where there is no GPU: notes when the host waits for it."""

    waited: list[Event] = field(repr=False)

    def record(self, _: object) -> None:
        """Nothing to do."""

    def synchronize(self) -> None:
        self.waited.append(self)


def test_the_host_waits_for_the_action_before_those_that_may_be_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Event] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(waited))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    clock = CudaActionClock(torch.device("cuda"))
    for _ in range(2):
        clock.start()
        waited.clear()
        ends: list[object] = []
        for done in range(QUEUED + 3):
            clock.mark()
            clock.begin_action()
            assert waited == ends[: max(0, done + 1 - QUEUED)]
            ends.append(clock.end_action())


def test_without_a_trace_the_host_waits_just_so_but_no_event_takes_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Event] = []
    recorded: list[Event] = []
    asked: list[dict[str, object]] = []

    def make(**options: object) -> Event:
        asked.append(options)
        event = Event(waited)
        monkeypatch.setattr(event, "record", lambda _: recorded.append(event))
        return event

    monkeypatch.setattr(torch.cuda, "Event", make)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    clock = clock_for(torch.device("cuda"), trace=False)
    assert isinstance(clock, UntimedClock)
    for _ in range(2):
        clock.start()
        waited.clear()
        recorded.clear()
        for done in range(QUEUED + 3):
            assert clock.mark() is None
            assert clock.begin_action() is None
            assert waited == recorded[: max(0, done + 1 - QUEUED)]
            assert clock.end_action() is None
    assert asked == [{"blocking": True}] * QUEUED


def test_without_a_trace_a_cpu_looks_at_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = clock_for(torch.device("cpu"), trace=False)
    monkeypatch.setattr(time, "perf_counter", lambda: pytest.fail("the time was taken"))
    clock.start()
    assert [clock.begin_action(), clock.mark(), clock.end_action()] == [None] * 3


def test_on_a_cpu_an_action_costs_one_look_at_the_time() -> None:
    clock = clock_for(torch.device("cpu"))
    assert isinstance(clock, HostActionClock)
    assert clock.mark is clock.begin_action is clock.end_action is time.perf_counter
    marks = [clock.begin_action(), clock.mark(), clock.end_action()]
    assert clock.times(marks) == marks == sorted(marks)
