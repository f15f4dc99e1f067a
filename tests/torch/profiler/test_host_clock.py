"""The host's clock where the system takes the core away: inside a lap, at its ends, and for longer than passed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bapipe.torch.profiler.layer_clock import HostClock


def lap(monkeypatch: pytest.MonkeyPatch, times: list[float], waits: list[float]) -> float:
    """Seconds of one lap: what the clock reads before and after each of the two waits."""
    ticks: Iterator[float] = iter(times)
    counted: Iterator[float] = iter(waits)
    clock = HostClock()
    monkeypatch.setattr("bapipe.torch.profiler.layer_clock.time.perf_counter", lambda: next(ticks))
    monkeypatch.setattr(clock, "_waited", lambda: next(counted))
    clock.begin()
    clock.mark()
    clock.mark()
    (found,) = clock.read()
    assert found.device is None
    return found.host


@pytest.mark.parametrize(
    ("times", "waits", "worked"),
    [
        pytest.param([0, 1, 9, 10], [5, 5], 8, id="undisturbed: what lies between the readings"),
        pytest.param([0, 1, 109, 110], [5, 105], 10, id="waited within the lap: off, but the two readings count"),
        pytest.param([0, 1, 9, 110], [5, 105], 8, id="waited after the lap, before the wait was read"),
        pytest.param([0, 101, 109, 110], [5, 105], 8, id="waited before the lap, after the wait was read"),
        pytest.param([0, 1, 9, 10], [5, 105], 8, id="a wait that is longer than what passed is not believed"),
    ],
)
def test_the_wait_for_a_core_is_taken_off_where_it_was_timed(
    monkeypatch: pytest.MonkeyPatch, times: list[float], waits: list[float], worked: float
) -> None:
    assert lap(monkeypatch, times, waits) == worked
