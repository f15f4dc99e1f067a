"""The simulator against cases that were worked out by hand; a comment draws each where it helps."""

from __future__ import annotations

import dataclasses
import math

import pytest

from bapipe.errors import BaPipeError, DeadlockError
from bapipe.schedule.actions import Action, Kind, Lane
from bapipe.schedule.generators import (
    capped,
    data_parallel,
    interleaved,
    make_schedule,
    with_recompute,
    with_update,
)
from bapipe.simulator.lowering import Network, Route, lower
from bapipe.simulator.simulate import Costs, simulate, steady_period
from bapipe.simulator.summary import summarise
from bapipe.simulator.timeline import Timeline, Transfers


def starts(timeline: Timeline) -> dict[str, float]:
    """Action -> start. Of replicas' A and U the last one counts."""
    return {name: start for name, (start, _) in times(timeline).items()}


def times(timeline: Timeline) -> dict[str, tuple[float, float]]:
    found = {}
    for index in range(len(timeline.kinds)):
        microbatch = int(timeline.microbatches[index])
        kind = Kind(int(timeline.kinds[index]))
        action = Action(int(timeline.stages[index]), kind, None if microbatch < 0 else microbatch)
        found[str(action)] = (float(timeline.start[index]), float(timeline.end[index]))
    return found


def test_unequal_stages_and_links() -> None:
    #        0 1 2 3 4 5 6 7 8 9 . 1 2 3 4 5 6 7 8 9 . 1 2 3 4
    # rank 0 F0 ─F1 ─                  B0 ─ ─ ─        B1 ─ ─ ─
    # rank 1       F0 ─ ─B0 ─ ─ ─ ─ F1 ─ ─B1 ─ ─ ─ ─
    costs = Costs.of(2, forward=(2, 3), backward=(4, 5), transfer=1, transfer_backward=2)
    timeline = simulate(make_schedule("1f1b-sno", 2, 2), costs)
    assert times(timeline) == {
        "0F0": (0, 2),
        "0F1": (2, 4),
        "0B0": (13, 17),
        "0B1": (21, 25),
        "1F0": (3, 6),
        "1B0": (6, 11),
        "1F1": (11, 14),
        "1B1": (14, 19),
    }
    assert timeline.time == timeline.makespan == 25
    assert timeline.busy() == [12, 16]
    assert timeline.bubble == pytest.approx(1 - 28 / 50)
    assert timeline.spans() == [25, 16]
    assert timeline.peak_live() == [2, 1]
    # Rank 0 waits 11–13 and 19–21 for errors under way, rank 1 waits 2–3 for the first activation.
    assert timeline.exposed_communication() == [4, 1]
    assert sorted(timeline.transfers.arrival) == [3, 5, 13, 21]


class TestLinks:
    def test_transfers_of_one_direction_queue(self) -> None:
        costs = Costs.of(2, forward=1, backward=1, transfer=5)
        assert simulate(make_schedule("gpipe", 2, 3), costs).time == 34

    def test_latency_only_links_do_not_queue(self) -> None:
        costs = Costs.of(2, forward=1, backward=1, transfer=5)
        timeline = simulate(make_schedule("gpipe", 2, 3), costs, Network(latency_only=True))
        assert sorted(timeline.transfers.arrival)[:3] == [6, 7, 8]
        assert timeline.time == 18

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


class TestReplicas:
    def test_all_reduce_waits_for_every_replica(self) -> None:
        # rank 0  F0 F2 .  B0 .  .  .  B2 A ─ ─ ─ U
        # rank 1  F1 .  .  .  .  B1 .  .  A ─ ─ ─ U
        # rank 2  .  F0 B0 F1 B1 F2 B2 U ─
        schedule = with_update(make_schedule("1f1b-sno", 2, 3, replicas=[2, 1]))
        costs = Costs.of(2, forward=1, backward=1, all_reduce=(4, 0), update=(1, 2))
        timeline = simulate(schedule, costs)
        found = starts(timeline)
        assert {name: found[name] for name in ("0B0", "0B1", "0B2", "0A", "0U", "1U")} == {
            "0B0": 3,
            "0B1": 5,
            "0B2": 7,
            "0A": 8,
            "0U": 12,
            "1U": 7,
        }
        assert timeline.time == 13
        assert timeline.busy() == [5, 3, 8]  # all-reduce is communication
        assert timeline.bubble == pytest.approx(1 - 16 / 39)
        assert timeline.peak_live() == [3, 1]

    def test_data_parallel(self) -> None:
        timeline = simulate(data_parallel(4, 2), Costs.of(1, forward=1, backward=2, all_reduce=5, update=1))
        assert timeline.time == 2 * 3 + 5 + 1

    def test_all_reduce_hides_behind_other_stages(self) -> None:
        """Stage 1 reduces while stage 0 still runs backwards."""
        schedule = with_update(make_schedule("gpipe", 2, 2, replicas=[2, 2]))
        costs = Costs.of(2, forward=1, backward=1, all_reduce=(0, 1))
        assert (
            simulate(schedule, costs).time
            == simulate(schedule, dataclasses.replace(costs, all_reduce=(0, 0))).time
        )

    def test_a_replica_without_microbatches(self) -> None:
        schedule = with_update(make_schedule("gpipe", 2, 1, replicas=[3, 1]))
        timeline = simulate(schedule, Costs.of(2, forward=1, backward=1, all_reduce=1, update=1))
        assert timeline.num_ranks == 4
        assert timeline.time == 6
        assert timeline.busy() == [3, 1, 1, 3]


class TestRecompute:
    def test_time(self) -> None:
        schedule = with_recompute(make_schedule("1f1b-sno", 1, 2))
        assert simulate(schedule, Costs.of(1, forward=2, backward=4)).time == 16
        assert simulate(schedule, Costs.of(1, forward=2, backward=4, recompute=3)).time == 18

    def test_recomputing_while_the_error_is_under_way(self) -> None:
        """R needs only the stage's own input, so it runs before the error arrives."""
        schedule = with_recompute(make_schedule("1f1b-sno", 2, 1), [0])
        assert starts(simulate(schedule, Costs.of(2, forward=2, backward=4))) == {
            "0F0": 0,
            "1F0": 2,
            "1B0": 4,
            "0R0": 2,
            "0B0": 8,
        }

    def test_memory(self) -> None:
        """Only the kept input lives from F to R: 1 + 1 before, 10 + 1 while one is recomputed."""
        schedule, costs = make_schedule("gpipe", 1, 2), Costs.of(1, forward=2, backward=4)
        assert simulate(schedule, costs).peak_bytes_by_rank([10.0]) == [20]
        recomputed = simulate(with_recompute(schedule), costs)
        assert recomputed.peak_bytes_by_rank([10.0], [1.0]) == [11]
        assert recomputed.peak_live() == [2]

    def test_memory_of_some_stages(self) -> None:
        schedule = with_recompute(make_schedule("1f1b-sno", 2, 4), [0])
        timeline = simulate(schedule, Costs.of(2, forward=2, backward=4))
        assert timeline.peak_bytes_by_rank([10.0, 6.0], [1.0, 1.0]) == [11, 6]


class TestMemory:
    def test_bytes_are_the_cap_times_the_stash(self) -> None:
        timeline = simulate(make_schedule("1f1b-so", 3, 8), Costs.of(3, forward=1, backward=2))
        assert timeline.peak_bytes_by_rank([100.0, 10.0, 1.0]) == [600, 40, 2]

    def test_virtual_stages_add_up(self) -> None:
        costs = Costs.of(2, forward=2, backward=2).split(2)
        timeline = simulate(interleaved(2, 4, virtual=2), costs)
        # Rank 0 runs 0F0 0F1 2F0 2F1 0F2 2B0 0F3: then 4 of stage 0 and 1 of stage 2 live at once.
        assert timeline.peak_bytes_by_rank([10.0, 0.0, 1.0, 0.0])[0] == 41
        assert timeline.peak_features() == [2.5, 1.5]

    def test_features_of_a_split_backward_live_until_w(self) -> None:
        timeline = simulate(make_schedule("zb-h1", 3, 6), Costs.of(3, forward=1, backward=2))
        assert timeline.peak_live() == [3, 3, 3]


class TestFbp:
    COSTS = Costs.of(2, forward=1, backward=2, transfer=0)

    def test_slots(self) -> None:
        # Slots of rank 0:  F0 F1 F2 ─ B0 B1 B2 with F(m,i) in slot m+i and B(m,i) in slot m+2N−1−i from 0.
        timeline = simulate(make_schedule("fbp-as", 2, 3), self.COSTS)
        assert timeline.time == (3 + 2 - 1) * 3
        assert starts(timeline) == {
            "0F0": 0,
            "0F1": 1,
            "0F2": 2,
            "1F0": 1,
            "1F1": 2,
            "1F2": 5,
            "1B0": 2,
            "1B1": 5,
            "1B2": 8,
            "0B0": 5,
            "0B1": 8,
            "0B2": 10,
        }

    def test_static(self) -> None:
        assert simulate(make_schedule("fbp-as", 2, 3, slots="static"), self.COSTS).time == (3 + 2 * 2 - 1) * 3

    def test_update_follows_the_last_slot(self) -> None:
        schedule = with_update(make_schedule("fbp-as", 2, 3))
        timeline = simulate(schedule, dataclasses.replace(self.COSTS, update=(7.0, 5.0)))
        assert timeline.time == 12 + 7
        assert starts(timeline)["1U"] == 12

    def test_recompute_takes_its_own_time(self) -> None:
        schedule = with_recompute(make_schedule("fbp-as", 2, 3))
        assert simulate(schedule, dataclasses.replace(self.COSTS, recompute=(4.0, 4.0))).time == (3 + 2 - 1) * 7

    def test_links(self) -> None:
        schedule = make_schedule("fbp-as", 3, 4)
        costs = Costs.of(3, forward=1, backward=2, transfer=2)
        slots = 4 + 2 * 3 - 1
        alone = simulate(schedule, costs).time
        assert alone == 3 * 2 + (slots - 3 - 3) * 3 + 3 * 2  # a slot with F or B only is as long as a transfer, 2
        assert simulate(schedule, costs, Network(duplex="half")).time == slots * 4
        assert simulate(schedule, costs, Network(duplex="shared")).time == slots * 8
        after = simulate(schedule, costs, Network(sending="after-compute")).time
        assert after == (4 + 3 - 1) * 3 + slots * 2


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


class TestZeroBubble:
    def test_weight_gradient_is_half_the_backward_unless_given(self) -> None:
        assert Costs.of(2, forward=1, backward=3).weight_gradient == (1.5, 1.5)
        assert Costs.of(2, forward=1, backward=3, weight_gradient=1).input_gradient == (2, 2)

    def test_span_and_makespan_differ(self) -> None:
        timeline = simulate(make_schedule("zb-h2", 3, 8), Costs.of(3, forward=1, backward=2))
        assert max(timeline.spans()) == 8 * 3
        assert timeline.makespan == 8 * 3 + 2


class TestBandwidthDemand:
    def test_one_stage_sends_nothing(self) -> None:
        timeline = simulate(make_schedule("gpipe", 1, 4), Costs.of(1, forward=1, backward=2))
        assert timeline.bandwidth_demand() == 0

    def test_the_shorter_of_forward_and_backward_counts(self) -> None:
        timeline = simulate(make_schedule("1f1b-so", 3, 8), Costs.of(3, forward=4, backward=2))
        assert timeline.bandwidth_demand() == pytest.approx(1 / 2)

    def test_two_accelerators_of_fbp_read_as_the_table(self) -> None:
        timeline = simulate(make_schedule("fbp-as", 2, 4), Costs.of(2, forward=4, backward=2))
        assert timeline.bandwidth_demand() == pytest.approx(2 / 6)


class TestCosts:
    def test_one_value_for_all_or_one_each(self) -> None:
        costs = Costs.of(3, forward=1, backward=[2, 3, 4], transfer=[5, 6])
        assert costs.forward == (1, 1, 1)
        assert costs.backward == (2, 3, 4)
        assert costs.send_forward == costs.send_backward == (5, 6)
        assert (costs.num_stages, costs.transfer, costs.uniform) == (3, 6, False)
        assert Costs.of(3, forward=1, backward=2, transfer=5).uniform
        assert not Costs.of(3, forward=1, backward=2, transfer=5, transfer_backward=4).uniform

    def test_split_deals_round_robin(self) -> None:
        costs = Costs.of(2, forward=(2, 4), backward=(6, 8), transfer=1, transfer_backward=3).split(2)
        assert costs.forward == (1, 2, 1, 2)
        assert costs.backward == (3, 4, 3, 4)
        assert costs.send_forward == (1, 1, 1)
        assert costs.send_backward == (3, 3, 3)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"forward": 0}, "forward time must be a finite number of more than 0, got 0"),
            ({"forward": -1}, "forward time must be a finite number of more than 0, got -1"),
            ({"backward": [1, 0]}, "backward time must be a finite number of more than 0, got 0"),
            ({"forward": math.nan}, "forward time must be a finite number.*got nan"),
            ({"backward": math.inf}, "backward time must be a finite number.*got inf"),
            ({"transfer": -0.5}, "transfer time must be a finite number of at least 0, got -0.5"),
            ({"forward": [1, 2, 3]}, "forward time: 2 stages need one value or 2, got 3"),
            ({"transfer": [1, 2]}, "transfer time: 1 link need one value or 1, got 2"),
            ({"weight_gradient": 5}, "the weight gradient takes 5 of a backward of 2; lower it"),
            ({"all_reduce": -1}, "all-reduce time must be"),
            ({"update": math.nan}, "update time must be"),
            ({"forward": 1e200}, "between 1e-100 and 1e100, got 1e\\+200; choose another unit"),
            ({"forward": 1e-200}, "between 1e-100 and 1e100"),
        ],
    )
    def test_mistakes(self, arguments: dict[str, object], message: str) -> None:
        with pytest.raises(BaPipeError, match=message):
            Costs.of(2, **{"forward": 1, "backward": 2, **arguments})  # type: ignore[arg-type]

    def test_other_number_of_stages(self) -> None:
        with pytest.raises(BaPipeError, match="the schedule has 2 stages but the costs are of 3"):
            simulate(make_schedule("gpipe", 2, 2), Costs.of(3, forward=1, backward=1))


def test_deadlock() -> None:
    schedule = make_schedule("gpipe", 2, 2)
    swapped = Lane.of(0, [Action.parse(text) for text in ("0F0", "0B0", "0F1", "0B1")])
    with pytest.raises(DeadlockError, match="deadlock: rank 0 at 0B0, rank 1 at 1F1 wait for ever; reorder these"):
        simulate(
            dataclasses.replace(schedule, lanes=(swapped, schedule.lanes[1])), Costs.of(2, forward=1, backward=1)
        )


def test_a_schedule_is_lowered_once_per_network() -> None:
    schedule, costs = make_schedule("1f1b-so", 3, 6), Costs.of(3, forward=1, backward=1, transfer=2)
    assert lower(schedule, Network()) is lower(schedule, Network())
    expected = [
        simulate(make_schedule("1f1b-so", 3, 6), costs, Network(duplex=d)).time for d in ("full", "shared")
    ]  # type: ignore[arg-type]
    got = [simulate(schedule, costs, Network(duplex=d)).time for d in ("full", "shared")]  # type: ignore[arg-type]
    assert got == expected
    assert expected[0] != expected[1]
    assert dataclasses.replace(schedule) == schedule


def test_timeline_without_transfers_or_actions() -> None:
    """A recorded run may lack transfers, and a rank may have done nothing."""
    drawn = simulate(make_schedule("gpipe", 2, 2), Costs.of(2, forward=1, backward=1))
    bare = dataclasses.replace(drawn, transfers=Transfers.none(), num_ranks=3)
    assert bare.exposed_communication() == [0, 0, 0]
    assert bare.spans()[2] == 0
    assert bare.busy()[2] == 0
    assert bare.bandwidth_demand() == 0


class TestSummary:
    def test_closed_form_only_where_there_is_one(self) -> None:
        schedule = make_schedule("1f1b-sno", 2, 4)

        def form(
            costs: Costs, network: Network | None = None, made: object = schedule
        ) -> tuple[float | None, bool]:
            summary = summarise(made, costs, simulate(made, costs, network), network)  # type: ignore[arg-type]
            return summary.closed_form, summary.closed_form_valid

        uniform = Costs.of(2, forward=10, backward=20, transfer=5)
        assert form(uniform) == (170, True)
        assert form(uniform, Network(duplex="half")) == (None, False)
        assert form(Costs.of(2, forward=(10, 11), backward=20)) == (None, False)
        assert form(uniform, made=with_recompute(schedule)) == (None, False)
        past = Costs.of(2, forward=10, backward=20, transfer=15)
        assert form(past, made=make_schedule("1f1b-so", 2, 4)) == (180, False)

    def test_slot_rule_is_said(self) -> None:
        costs = Costs.of(2, forward=1, backward=1)
        for rule in ("table", "static"):
            made = make_schedule("fbp-as", 2, 4, slots=rule)
            assert summarise(made, costs, simulate(made, costs)).slots == rule
        plain = make_schedule("gpipe", 2, 4)
        assert summarise(plain, costs, simulate(plain, costs)).slots is None
