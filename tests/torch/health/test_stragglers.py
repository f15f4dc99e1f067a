"""Which rank is named as slow, when, and what it is said to cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from bapipe.torch.health.stragglers import QUIET_STEPS, WINDOW, Straggler, StragglerMonitor, planned_seconds
from report_plans import planned


def watched(monitor: StragglerMonitor, steps: int, busy: Sequence[float], *, first: int = 0) -> list[Straggler]:
    """What is said of so many steps, each as long as the slowest rank computes and 10 ms more."""
    found = [monitor.observe(first + step, busy, max(busy) + 0.01) for step in range(steps)]
    return [item for item in found if item is not None]


def test_a_rank_that_becomes_slow_is_named_with_its_cost() -> None:
    monitor = StragglerMonitor(None, global_batch=32)
    assert watched(monitor, 2 + WINDOW, [0.02, 0.03]) == []
    (found,) = watched(monitor, WINDOW, [0.15, 0.03], first=2 + WINDOW)
    assert (found.rank, found.step, found.against) == (0, 1 + 2 * WINDOW, "past")
    assert found.factor == pytest.approx(7.5)
    assert found.throughput == pytest.approx(32 / 0.16)
    # Without the slowness a step takes 130 ms less, which is what the other rank computes.
    assert found.throughput + found.lost == pytest.approx(32 / 0.03)
    assert found.line == (
        "rank 0 has become slow: in steps 10 to 17 it computes 150 ms a step, 20 ms before (7.5x), "
        "which costs about 866.7 samples/s of 1066.7"
    )


def test_it_is_named_again_only_after_many_steps() -> None:
    monitor = StragglerMonitor(None, global_batch=32)
    watched(monitor, 2 + WINDOW, [0.02, 0.03])
    said = watched(monitor, 2 * QUIET_STEPS, [0.15, 0.03], first=2 + WINDOW)
    assert [item.step for item in said] == [17, 17 + QUIET_STEPS]


@pytest.mark.parametrize(
    "busy",
    [
        pytest.param([0.027, 0.03], id="less-than-1.5x"),
        pytest.param([0.0, 0.3], id="a-rank-that-records-nothing"),
    ],
)
def test_it_is_not_named_without_reason(busy: list[float]) -> None:
    monitor = StragglerMonitor(None, global_batch=32)
    watched(monitor, 2 + WINDOW, [0.02, 0.03])
    assert watched(monitor, 3 * WINDOW, busy, first=2 + WINDOW) == []


def test_milliseconds_and_what_nobody_waits_for_are_not_worth_a_word() -> None:
    short = StragglerMonitor(None, global_batch=32)
    watched(short, 2 + WINDOW, [0.001, 0.001])
    assert watched(short, WINDOW, [0.004, 0.001], first=2 + WINDOW) == []
    idle = StragglerMonitor(None, global_batch=32)
    watched(idle, 2 + WINDOW, [0.02, 0.2])
    assert watched(idle, WINDOW, [0.06, 0.2], first=2 + WINDOW) == [], "the other rank takes longer still"


def test_single_steps_do_not_count() -> None:
    monitor = StragglerMonitor(None, global_batch=32)
    for step in range(20 * WINDOW):
        busy = [0.3 if step % 3 == 0 else 0.02, 0.03]
        assert monitor.observe(step, busy, 0.4) is None


def test_a_rank_may_be_slower_than_its_plan_from_the_start() -> None:
    monitor = StragglerMonitor([0.01, 0.03, 0.02], global_batch=32)
    (found,) = watched(monitor, 2 + WINDOW, [0.02, 0.3, 0.04])
    assert (found.rank, found.against) == (1, "plan")
    assert found.expected == pytest.approx(0.06), "all take twice what was planned"
    assert found.line.startswith(
        "rank 1 is slower than planned: in steps 2 to 9 it computes 300 ms a step, 60 ms by"
    )
    calm = StragglerMonitor([0.01, 0.03, 0.02], global_batch=32)
    assert watched(calm, 5 * WINDOW, [0.03, 0.09, 0.06]) == []


def test_what_a_rank_computes_by_the_plan() -> None:
    plan = planned("straight")[0]
    expected = [
        sum(stage.forward + stage.backward for stage in plan.stages if name in stage.accelerators)
        * plan.microbatches
        for name in plan.ranks
    ]
    assert planned_seconds(plan) == pytest.approx(expected)
    assert planned_seconds(replace(plan, prediction=replace(plan.prediction, source="none"))) is None
