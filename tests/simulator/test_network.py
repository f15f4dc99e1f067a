"""Links of the simulator, free and blocking, against cases that were worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bapipe.errors import BaPipeError, DeadlockError
from bapipe.schedule.generators import interleaved, make_schedule
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.lowering import Network, Route
from bapipe.simulator.simulate import simulate
from simulated_times import starts


class TestLinks:
    def test_transfers_of_one_direction_queue(self) -> None:
        costs = Costs.of(2, forward=1, backward=1, transfer=5)
        assert simulate(make_schedule("gpipe", 2, 3), costs).time == 34

    def test_latency_only_links_do_not_queue(self) -> None:
        costs = Costs.of(2, forward=1, backward=1, transfer=5)
        timeline = simulate(make_schedule("gpipe", 2, 3), costs, Network(latency_only=True))
        assert sorted(timeline.transfers.arrival)[:3] == [6, 7, 8]
        assert timeline.time == 18

    @pytest.mark.parametrize("name", ["gpipe", "1f1b-sno", "zb-h1", "interleaved", "zb-v"])
    def test_transfers_know_the_action_that_they_feed(self, name: str) -> None:
        costs = Costs.of(6 if name in ("interleaved", "zb-v") else 3, forward=2, backward=3, transfer=1)
        timeline = simulate(make_schedule(name, 3, 4), costs)
        unknown = replace(timeline, transfers=replace(timeline.transfers, target=None))
        assert timeline.transfers.target is not None
        assert timeline.consumers().tolist() == unknown.consumers().tolist()

    def test_half_duplex(self) -> None:
        # 1B0 ends at 7 and must wait until 9 for the activation of micro-batch 1 to leave the link.
        costs = Costs.of(2, forward=1, backward=1, transfer=4)
        schedule = make_schedule("1f1b-sno", 2, 2)
        assert simulate(schedule, costs).time == 16
        shared = simulate(schedule, costs, Network(duplex="half"))
        assert shared.time == 18
        assert sorted(shared.transfers.start) == [1, 5, 9, 13]

    def test_shared_bus(self) -> None:
        costs = Costs.of(3, forward=1, backward=1, transfer=3)
        schedule = make_schedule("gpipe", 3, 2)
        assert simulate(schedule, costs).time == 24
        shared = simulate(schedule, costs, Network(duplex="shared"))
        assert sorted(shared.transfers.start) == [1, 4, 7, 10, 15, 18, 21, 24]
        assert shared.time == 28

    def test_cut_through(self) -> None:
        schedule = make_schedule("1f1b-as", 2, 1)
        hidden, longer = (Costs.of(2, forward=4, backward=4, transfer=transfer) for transfer in (2, 6))
        assert simulate(schedule, hidden).time == 16
        # The activation leaves at 0 and arrives at 6; the error leaves at 10 and arrives at 16.
        assert starts(simulate(schedule, longer)) == {"0F0": 0, "1F0": 6, "1B0": 10, "0B0": 16}
        assert simulate(schedule, longer, Network(sending="after-compute")).time == 28

    def test_bandwidth_and_latency(self) -> None:
        # 100 bytes at 50 bytes/s and 1 s of latency: a link is free again after 2 s, the data is there after 3 s.
        routes = {
            (0, 1): Route(seconds_per_unit=1 / 50, latency=1),
            (1, 0): Route(seconds_per_unit=1 / 50, latency=1),
        }
        costs = Costs.of(2, forward=1, backward=1, transfer=100)
        timeline = simulate(make_schedule("gpipe", 2, 2), costs, Network(routes=routes))
        assert sorted(timeline.transfers.start)[:2] == [1, 3]
        assert sorted(timeline.transfers.arrival)[:2] == [4, 6]

    def test_routes_may_share_a_link(self) -> None:
        routes = {pair: Route(link="switch") for pair in ((0, 1), (1, 0), (1, 2), (2, 1))}
        costs = Costs.of(3, forward=1, backward=1, transfer=3)
        schedule = make_schedule("gpipe", 3, 2)
        assert simulate(schedule, costs, Network(routes=routes)).time == 28

    def test_missing_route(self) -> None:
        costs = Costs.of(2, forward=1, backward=1, transfer=1)
        with pytest.raises(BaPipeError, match="no link from rank 1 to rank 0; add it"):
            simulate(make_schedule("gpipe", 2, 2), costs, Network(routes={(0, 1): Route()}))

    def test_virtual_stages_on_one_rank_need_no_link(self) -> None:
        costs = Costs.of(1, forward=2, backward=2, transfer=100).split(2)
        timeline = simulate(interleaved(1, 2, virtual=2), costs)
        assert len(timeline.transfers) == 0
        assert timeline.time == 8
        assert timeline.exposed_communication() == [0]


class TestBlocking:
    def test_both_ranks_stand_still(self) -> None:
        #        0 1 2 3 4 5 6 7 8 9 . 1 2 3 4 5 6 7
        # rank 0 F0 ─ × F1 ─ .  .  . × B0 ─ ─ .  . × B1 ─ ─     × exchange
        # rank 1      × F0 ─ B0 ─ ─ × F1 ─ B1 ─ ─ ×
        costs = Costs.of(2, forward=2, backward=3, transfer=1)
        timeline = simulate(make_schedule("1f1b-sno", 2, 2), costs, Network(sending="blocking"))
        assert starts(timeline) == {
            "0F0": 0,
            "0F1": 3,
            "0B0": 9,
            "0B1": 15,
            "1F0": 3,
            "1B0": 5,
            "1F1": 9,
            "1B1": 11,
        }
        assert timeline.time == 18
        assert sorted(timeline.transfers.start) == [2, 8, 8, 14]
        assert timeline.busy() == [10, 10]

    def test_transfers_know_their_source(self) -> None:
        costs = Costs.of(3, forward=2, backward=3, transfer=1)
        timeline = simulate(make_schedule("1f1b-sno", 3, 4), costs, Network(sending="blocking"))
        for index, source in enumerate(timeline.transfers.source):
            assert timeline.transfers.start[index] >= timeline.end[source]
            towards = 1 if timeline.kinds[source] == 0 else -1
            assert timeline.transfers.to_rank[index] == timeline.ranks[source] + towards
        assert (timeline.consumers() >= 0).all()

    def test_bytes(self) -> None:
        routes = {pair: Route(seconds_per_unit=0.5, latency=1) for pair in ((0, 1), (1, 0))}
        costs = Costs.of(2, forward=2, backward=3, transfer=4)
        timeline = simulate(make_schedule("1f1b-sno", 2, 1), costs, Network(sending="blocking", routes=routes))
        assert timeline.time == 2 + 3 + 2 + 3 + 3 + 3

    def test_deadlock_names_ranks_and_actions(self) -> None:
        costs = Costs.of(2, forward=1, backward=1).split(2)
        with pytest.raises(
            DeadlockError, match=r"rank 0 at \d[FB]\d, rank 1 at \d[FB]\d wait for ever; use links"
        ):
            simulate(interleaved(2, 4), costs, Network(sending="blocking"))

    def test_lanes_that_run_at_once_cannot_block(self) -> None:
        costs = Costs.of(2, forward=1, backward=1)
        with pytest.raises(BaPipeError, match="fbp-as runs F and B at once"):
            simulate(make_schedule("fbp-as", 2, 4), costs, Network(sending="blocking"))
