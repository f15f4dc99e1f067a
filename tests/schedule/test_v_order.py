"""V-shaped orders made for times and memory."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapipe.schedule.actions import Kind, Schedule
from bapipe.schedule.generators import SCHEDULES
from bapipe.schedule.inflight import v_activations
from bapipe.schedule.list_schedule import StageTimes
from bapipe.schedule.v_order import quickest_v_order, v_orders
from bapipe.schedule.validate import check
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.simulate import simulate
from example_counts import examples

TIME, BYTES = st.integers(1, 20), st.integers(0, 9)
NAMES = st.sampled_from(["zb-v", "v-half", "v-min"])


@st.composite
def stages(draw: st.DrawFn) -> list[StageTimes]:
    """Of one rank to five, each stage of its own; some have no weight gradients worth deferring."""
    count = 2 * draw(st.integers(1, 5))
    return [
        StageTimes(
            forward=draw(TIME),
            input_gradient=draw(TIME),
            weight_gradient=draw(st.integers(0, 20)),
            send_forward=draw(st.integers(0, 6)),
            send_backward=draw(st.integers(0, 6)),
            inflight=draw(BYTES),
            delayed=draw(BYTES),
        )
        for _ in range(count)
    ]


def costs_of(own: list[StageTimes]) -> Costs:
    return Costs.of(
        len(own),
        forward=[item.forward for item in own],
        backward=[item.input_gradient + item.weight_gradient for item in own],
        weight_gradient=[item.weight_gradient for item in own],
        transfer=[item.send_forward for item in own[:-1]],
        transfer_backward=[item.send_backward for item in own[1:]],
    )


def held_bytes(schedule: Schedule, own: list[StageTimes]) -> list[float]:
    peaks = []
    for lane in schedule.lanes:
        now = most = 0.0
        for action in lane:
            item = own[action.stage]
            change = {
                Kind.F: item.inflight,
                Kind.B: -item.inflight,
                Kind.I: item.delayed - item.inflight,
                Kind.W: -item.delayed,
            }
            now += change[action.kind]
            most = max(most, now)
        peaks.append(most)
    return peaks


@settings(max_examples=examples(30))
@given(own=stages(), name=NAMES, microbatches=st.integers(1, 14))
def test_every_order_is_right_and_within_the_published_memory(
    own: list[StageTimes], name: str, microbatches: int
) -> None:
    costs, ranks = costs_of(own), len(own) // 2
    for schedule in v_orders(name, own, microbatches):
        assert check(schedule, sends="windowed") == []
        assert schedule.name == name
        timeline = simulate(schedule, costs)
        assert 2 * max(timeline.peak_activations()) <= v_activations(name, ranks)


@settings(max_examples=examples(30))
@given(own=stages(), name=NAMES, microbatches=st.integers(1, 10), data=st.data())
def test_orders_keep_to_the_bytes_of_each_rank(
    own: list[StageTimes], name: str, microbatches: int, data: st.DataObject
) -> None:
    ranks = len(own) // 2
    least = [own[rank].most + own[2 * ranks - 1 - rank].most for rank in range(ranks)]
    room = [float(need + data.draw(st.integers(0, 40))) for need in least]
    for schedule in list(v_orders(name, own, microbatches, room=room))[1:]:
        assert check(schedule, sends="windowed") == []
        assert all(most <= have for most, have in zip(held_bytes(schedule, own), room, strict=True))


def test_too_little_room_for_two_micro_batches_still_gets_through() -> None:
    own = [StageTimes(forward=1, input_gradient=1, weight_gradient=1, inflight=4, delayed=3) for _ in range(6)]
    for schedule in list(v_orders("zb-v", own, 5, room=[1.0] * 3))[1:]:
        assert check(schedule, sends="windowed") == []
        assert max(held_bytes(schedule, own)) <= 8


def test_never_slower_than_the_published_order_and_mostly_faster() -> None:
    """On random times at the same memory; torch runs the published order of ZB-V (`test_v_shape`)."""
    chance, faster, shares = random.Random(7), 0, []
    for _ in range(30):
        ranks = chance.randint(2, 4)
        own = [
            StageTimes(
                forward=chance.uniform(0.5, 2),
                input_gradient=chance.uniform(0.5, 2),
                weight_gradient=chance.uniform(0.5, 2),
                send_forward=chance.uniform(0, 0.3),
                send_backward=chance.uniform(0, 0.3),
            )
            for _ in range(2 * ranks)
        ]
        name, microbatches, costs = chance.choice(["zb-v", "v-half", "v-min"]), 3 * ranks, costs_of(own)
        published = simulate(SCHEDULES[name](ranks, microbatches), costs).time
        best = simulate(quickest_v_order(name, costs, microbatches), costs).time
        assert best <= published
        faster += best < published
        shares.append(best / published)
    assert faster >= 15
    assert sum(shares) / len(shares) < 0.99


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_alike_times_keep_the_published_order(ranks: int) -> None:
    """ZB-V has no bubble then, so that nothing is faster."""
    costs = Costs.of(2 * ranks, forward=1, backward=2, weight_gradient=1)
    assert quickest_v_order("zb-v", costs, 3 * ranks).lanes == SCHEDULES["zb-v"](ranks, 3 * ranks).lanes


def test_dualpipe_v_has_one_order() -> None:
    own = [StageTimes(forward=1, input_gradient=2, weight_gradient=1) for _ in range(4)]
    assert [schedule.lanes for schedule in v_orders("dualpipe-v", own, 6)] == [SCHEDULES["dualpipe-v"](2, 6).lanes]
