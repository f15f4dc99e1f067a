"""The steady period of asynchronous schedules, against cases that were worked out by hand."""

from __future__ import annotations

import pytest

from bapipe.errors import BaPipeError
from bapipe.schedule.generators import capped, make_schedule
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.lowering import Network, Route
from bapipe.simulator.simulate import simulate
from bapipe.simulator.steady_period import steady_period
from bapipe.simulator.summary import summarise


class TestPipeDream:
    def test_time_is_the_steady_period(self) -> None:
        schedule = make_schedule("pipedream", 2, 10)
        costs = Costs.of(2, forward=(1, 2), backward=(2, 4), transfer=1)
        timeline = simulate(schedule, costs)
        assert timeline.period == 6  # the slower stage; the loop takes (3 + 6 + 2)/2
        assert timeline.time == 60
        assert timeline.makespan > timeline.time
        assert timeline.bubble == pytest.approx(1 - (30 + 60) / 120)

    def test_weight_versions(self) -> None:
        schedule, costs = make_schedule("pipedream", 3, 10), Costs.of(3, forward=1, backward=2)
        summary = summarise(schedule, costs, simulate(schedule, costs))
        assert summary.weights_memory == [4, 3, 2]
        assert summary.period == 3
        assert summary.closed_form == 30

    def test_loop_of_uniform_stages(self) -> None:
        schedule, costs = make_schedule("pipedream", 4, 10), Costs.of(4, forward=10, backward=20, transfer=5)
        assert steady_period(schedule, costs) == 30 + 2 * 5 * 3 / 4

    def test_links_bound_the_period(self) -> None:
        schedule = make_schedule("pipedream", 2, 10)
        costs = Costs.of(2, forward=1, backward=1, transfer=7)
        assert steady_period(schedule, costs) == (4 + 14) / 2
        assert steady_period(schedule, costs, Network(duplex="half")) == 14
        more = capped(2, 10, [20, 1])
        assert steady_period(more, costs) == 7
        assert steady_period(more, costs, Network(latency_only=True)) == 2
        assert steady_period(more, costs, Network(duplex="shared")) == 14

    def test_latency_does_not_hold_the_link(self) -> None:
        routes = {pair: Route(latency=100.0) for pair in ((0, 1), (1, 0))}
        costs = Costs.of(2, forward=1, backward=1, transfer=7)
        assert steady_period(capped(2, 10, [200, 1]), costs, Network(routes=routes)) == 7

    def test_cut_through_hides_what_the_compute_covers(self) -> None:
        schedule = make_schedule("1f1b-as", 4, 10)
        assert steady_period(schedule, Costs.of(4, forward=10, backward=20, transfer=10)) == 30

    @pytest.mark.parametrize(
        ("schedule", "network", "message"),
        [
            (make_schedule("interleaved", 2, 4), None, "interleaved has no caps, so it has no steady period"),
            (
                make_schedule("pipedream", 4, 4),
                Network(sending="blocking"),
                "no known steady period with blocking",
            ),
            (capped(4, 4, [1, 2, 1, 1]), None, "stage 0 may hold 1 micro-batches but stage 1 wants 2"),
        ],
    )
    def test_where_there_is_none(self, schedule: object, network: Network | None, message: str) -> None:
        with pytest.raises(BaPipeError, match=message):
            steady_period(schedule, Costs.of(4, forward=1, backward=1), network)  # type: ignore[arg-type]
