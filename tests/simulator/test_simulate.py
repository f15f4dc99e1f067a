"""The simulator against cases that were worked out by hand; a comment draws each where it helps."""

from __future__ import annotations

import dataclasses

import pytest

from bapipe.errors import DeadlockError
from bapipe.schedule.actions import Action, Lane
from bapipe.schedule.generators import (
    data_parallel,
    interleaved,
    make_schedule,
    with_recompute,
    with_update,
)
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.lowering import Network, lower
from bapipe.simulator.simulate import simulate
from bapipe.simulator.summary import summarise
from bapipe.simulator.timeline import Transfers
from simulated_times import starts, times


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
    assert timeline.peak_in_flight() == [2, 1]
    # Rank 0 waits 11–13 and 19–21 for errors under way, rank 1 waits 2–3 for the first activation.
    assert timeline.exposed_communication() == [4, 1]
    assert sorted(timeline.transfers.arrival) == [3, 5, 13, 21]


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
        assert timeline.peak_in_flight() == [3, 1]

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
        assert recomputed.peak_in_flight() == [2]

    def test_memory_of_some_stages(self) -> None:
        schedule = with_recompute(make_schedule("1f1b-sno", 2, 4), [0])
        timeline = simulate(schedule, Costs.of(2, forward=2, backward=4))
        assert timeline.peak_bytes_by_rank([10.0, 6.0], [1.0, 1.0]) == [11, 6]


class TestMemory:
    def test_bytes_are_the_cap_times_the_saved_activations(self) -> None:
        timeline = simulate(make_schedule("1f1b-so", 3, 8), Costs.of(3, forward=1, backward=2))
        assert timeline.peak_bytes_by_rank([100.0, 10.0, 1.0]) == [600, 40, 2]

    def test_virtual_stages_add_up(self) -> None:
        costs = Costs.of(2, forward=2, backward=2).split(2)
        timeline = simulate(interleaved(2, 4, virtual=2), costs)
        # Rank 0 runs 0F0 0F1 2F0 2F1 0F2 2B0 0F3: then 4 of stage 0 and 1 of stage 2 live at once.
        assert timeline.peak_bytes_by_rank([10.0, 0.0, 1.0, 0.0])[0] == 41
        assert timeline.peak_activations() == [2.5, 1.5]

    def test_features_of_a_split_backward_live_until_w(self) -> None:
        timeline = simulate(make_schedule("zb-h1", 3, 6), Costs.of(3, forward=1, backward=2))
        assert timeline.peak_in_flight() == [3, 3, 3]


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

    @pytest.mark.parametrize("name", ["gpipe", "fbp-as", "1f1b-so", "zb-h2", "pipedream"])
    def test_actions_that_the_clock_does_not_tell_apart_do_not_overflow(self, name: str) -> None:
        """Beside transfers of 1e20 an action of 10 has no span, and such rates add up; warnings are errors."""
        timeline = simulate(make_schedule(name, 4, 16), Costs.of(4, forward=10, backward=20, transfer=1e20))
        assert 0 <= timeline.bandwidth_demand() < float("inf")

    def test_two_accelerators_of_fbp_read_as_the_table(self) -> None:
        timeline = simulate(make_schedule("fbp-as", 2, 4), Costs.of(2, forward=4, backward=2))
        assert timeline.bandwidth_demand() == pytest.approx(2 / 6)


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
