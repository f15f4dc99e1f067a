"""Boundaries over which no gradient comes back: nothing is sent there, and nothing waits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bapipe.schedule.actions import Kind, Schedule
from bapipe.schedule.generators import capped, gpipe, make_schedule, with_update
from bapipe.schedule.list_schedule import Preference, StageTimes, timed_order
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.network import Network, Route
from bapipe.simulator.scenario_times import ManyCosts, many_times, scenario_times
from bapipe.simulator.simulate import simulate
from bapipe.simulator.steady_period import steady_period

SCHEDULES = [with_update(make_schedule(name, 3, 6)) for name in ("1f1b-sno", "1f1b-so", "gpipe", "zb-h1")]


def _costs(unanswered: tuple[int, ...]) -> Costs:
    """The stages before the last unanswered boundary have no backward."""
    first = max(unanswered, default=-1) + 1
    backward = [0.0 if stage < first else 4.0 for stage in range(3)]
    weights = tuple(4.0 if stage == first else value / 2 for stage, value in enumerate(backward))
    costs = Costs.of(3, forward=[3.0, 2.0, 1.0], backward=4.0, transfer=0.5)
    return replace(
        costs,
        backward=tuple(backward),
        weight_gradient=weights,
        input_gradient=tuple(whole - part for whole, part in zip(backward, weights, strict=True)),
        send_backward=tuple(0.0 if boundary in unanswered else 0.5 for boundary in range(2)),
        unanswered=unanswered,
    )


def _network(latency: float, sending: str | None = None) -> Network:
    routes = {(a, b): Route(seconds_per_unit=1.0, latency=latency) for a in range(3) for b in range(3)}
    return Network(routes=routes, sending=sending)  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
@pytest.mark.parametrize("sending", [None, "blocking"])
def test_a_backward_without_an_answer_waits_for_nothing(schedule: Schedule, sending: str | None) -> None:
    timeline = simulate(schedule, _costs((0,)), _network(5.0, sending))
    back = timeline.kinds[timeline.transfers.source] != Kind.F
    assert set(timeline.stages[timeline.transfers.source[back]].tolist()) == {2}, "only stage 2 sends back"
    waited = simulate(schedule, replace(_costs((0,)), unanswered=()), _network(5.0, sending))
    assert timeline.time < waited.time
    if sending is None:
        own = timeline.ranks == 0
        assert timeline.end[own].max() == pytest.approx(6 * 3.0), "the first stage runs ahead of all"


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_many_cases_at_once_are_those_of_the_simulator(schedule: Schedule) -> None:
    """Cases of one schedule that differ in where no gradient comes back."""
    cases = [_costs(()), _costs((0,)), _costs((0, 1)), _costs(())]
    network = _network(0.25)
    names = {
        Kind.F: "forward",
        Kind.B: "backward",
        Kind.I: "input_gradient",
        Kind.W: "weight_gradient",
        Kind.R: "recompute",
        Kind.A: "all_reduce",
        Kind.U: "update",
    }
    together = many_times(
        schedule,
        network,
        ManyCosts(
            seconds={
                int(kind): np.array([getattr(case, name) for case in cases]).T for kind, name in names.items()
            },
            send_forward=np.array([case.send_forward for case in cases]).T,
            send_backward=np.array([case.send_backward for case in cases]).T,
            answered=np.array([[boundary not in case.unanswered for case in cases] for boundary in range(2)]),
            rate=np.ones((3, 3, len(cases))),
            latency=np.full((3, 3, len(cases)), 0.25),
        ),
    )
    alone = [simulate(schedule, case, network).time for case in cases]
    assert together is not None
    assert together.tolist() == alone
    assert scenario_times(schedule, [cases[1]] * 2, [network] * 2).tolist() == [alone[1]] * 2


def test_no_loop_of_an_endless_pipeline_goes_through_such_a_boundary() -> None:
    """One micro-batch in flight everywhere: all stages take turns, but the first goes by itself."""
    schedule = capped(3, 8, [1, 1, 1])
    assert steady_period(schedule, _costs(())) == 3 + 2 + 1 + 3 * 4 + 4 * 0.5
    assert steady_period(schedule, _costs((0,))) == 2 + 1 + 2 * 4 + 2 * 0.5
    assert steady_period(schedule, _costs((0, 1))) == 1 + 4


def test_an_order_made_for_such_stages_does_not_wait() -> None:
    ahead = StageTimes(
        forward=2.0, input_gradient=0.0, weight_gradient=0.0, send_forward=1.0, send_backward=0.0, cap=1,
        answered=False,
    )  # fmt: skip
    last = StageTimes(
        forward=1.0, input_gradient=2.0, weight_gradient=0.0, send_forward=0.0, send_backward=0.0, cap=1
    )
    preference = Preference(forward_first=True, gap=1.0)
    order, seconds = timed_order([ahead, last], 4, preference)
    assert seconds == 2 + 1 + 4 * 3
    assert order.num_microbatches == 4
    waiting = timed_order([replace(ahead, answered=True), last], 4, preference)[1]
    assert waiting == 4 * (2 + 1 + 3)


def test_a_schedule_is_lowered_anew_for_other_boundaries() -> None:
    schedule = gpipe(3, 4)
    times = [simulate(schedule, _costs(unanswered)).time for unanswered in ((), (0,), ())]
    assert times[0] == times[2] > times[1]
