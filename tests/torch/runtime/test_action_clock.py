"""Clocks: how far the host may run ahead of a GPU, and that on a CPU an action costs one look at the time."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest

torch = pytest.importorskip("torch", reason="a run's clocks need torch: pip install bapipe[torch]")

from bapipe.torch.runtime.action_clock import QUEUED, CudaActionClock, HostActionClock, clock_for  # noqa: E402


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


def test_on_a_cpu_an_action_costs_one_look_at_the_time() -> None:
    clock = clock_for(torch.device("cpu"))
    assert isinstance(clock, HostActionClock)
    assert clock.mark is clock.begin_action is clock.end_action is time.perf_counter
    marks = [clock.begin_action(), clock.mark(), clock.end_action()]
    assert clock.times(marks) == marks == sorted(marks)
