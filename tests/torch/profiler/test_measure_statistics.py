"""Medians, intervals, when to stop, and what a GPU's queue makes of two clocks."""

from __future__ import annotations

import random

import pytest

from bapipe.errors import BaPipeError
from bapipe.torch.profiler.grouping import find_units
from bapipe.torch.profiler.layer_times import run_ahead
from bapipe.torch.profiler.measurement import Reading
from bapipe.torch.profiler.statistics import SampleSummary, Stopping, pooled, summarise


def reading(seconds: float) -> Reading:
    return Reading(host=SampleSummary(median=seconds, low=seconds, high=seconds, count=3))


def test_the_interval_of_few_samples_is_their_range() -> None:
    found = summarise([3.0, 1.0, 2.0])
    assert (found.median, found.low, found.high, found.count) == (2.0, 1.0, 3.0, 3)
    assert found.half_width == 0.5


@pytest.mark.parametrize("count", [6, 25, 400, 1000])
def test_the_interval_covers_the_median_19_times_of_20(count: int) -> None:
    generator = random.Random(count)
    hits = 0
    for _ in range(300):
        found = summarise([generator.expovariate(1.0) for _ in range(count)])
        hits += found.low <= 0.6931471805599453 <= found.high
    assert hits >= 300 * 0.92


def test_rounds_count_alike() -> None:
    both = pooled([summarise([1.0] * 3), summarise([2.0] * 1)])
    assert (both.median, both.low, both.high, both.count) == (1.5, 1.0, 2.0, 4)


def test_stopping_by_confidence_number_or_time() -> None:
    rule = Stopping(minimum=3, maximum=5, half_width=0.02, seconds=1.0)
    assert not rule.done([1.0, 1.0], spent=9.0)
    assert rule.done([1.0, 1.0, 1.01], spent=0.0)
    assert not rule.done([1.0, 2.0, 3.0], spent=0.0)
    assert rule.done([1.0, 2.0, 3.0], spent=2.0)
    assert rule.done([1.0, 2.0, 3.0, 4.0, 5.0], spent=0.0)
    assert not Stopping(exact=4).done([1.0] * 3, spent=99.0)


def test_no_iterations_are_refused() -> None:
    with pytest.raises(BaPipeError, match="at least once, got 0 iterations; raise them"):
        Stopping(exact=0)


def test_the_device_hides_what_the_host_issues_ahead() -> None:
    """Host 1 1 1, device 5 0.1 0.1: the host is done long before the device, so only its first wait shows."""
    assert run_ahead([1.0, 1.0, 1.0], [5.0, 0.1, 0.1]) == pytest.approx([5.0, 0.1, 0.1])
    assert run_ahead([1.0, 1.0, 1.0], [0.1, 0.1, 0.1]) == pytest.approx([1.0, 1.0, 1.0])
    assert sum(run_ahead([1.0, 1.0, 1.0], [0.1, 5.0, 0.1])) == pytest.approx(1.0 + 5.0 + 0.1)
    assert run_ahead([1.0, 2.0], [None, None]) == [1.0, 2.0]


def test_small_layers_join_their_neighbours() -> None:
    forward = [reading(value) for value in (1e-3, 2e-6, 2e-6, 1e-3, 2e-6)]
    backward = [reading(value) for value in (1e-3, 2e-6, 4e-6, 1e-3, 2e-6)]
    units, ahead, back = find_units(forward, backward, reading(1e-6), reading(1e-6))
    assert units == ((0, 0), (1, 2), (3, 4))
    assert ahead == pytest.approx((1.0, 0.5, 0.5, 0.999, 0.001), abs=1e-4)
    assert back[1:3] == pytest.approx((0.25, 0.75))
    assert find_units(forward[1:3], backward[1:3], reading(1.0), reading(1.0))[0] == ((0, 1),)


def test_layers_without_an_input_gradient_are_not_joined_with_others() -> None:
    """Of an embedding and the layer after it together no input gradient could be timed."""
    times = [reading(2e-6)] * 5
    flags = [False, False, True, True, True]
    assert find_units(times, times, reading(1e-6), reading(1e-6))[0] == ((0, 1), (2, 4))
    assert find_units(times, times, reading(1e-6), reading(1e-6), flags)[0] == ((0, 1), (2, 4))
    assert find_units(times, times, reading(1e-6), reading(1e-6), [False, *[True] * 4])[0] == (
        (0, 0),
        (1, 2),
        (3, 4),
    )
    assert find_units(times[:2], times[:2], reading(1.0), reading(1.0), [False, True])[0] == ((0, 0), (1, 1))
