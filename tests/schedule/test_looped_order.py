"""Interleaving with a number of stages for every rank: placement, orders and what they hold."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapipe.errors import BaPipeError
from bapipe.schedule.actions import Kind, Schedule
from bapipe.schedule.closed_forms import closed_form
from bapipe.schedule.generators import make_schedule, with_update
from bapipe.schedule.inflight import interleaved_warm_up
from bapipe.schedule.looped_order import (
    LOOPED_CHOICES,
    LoopedChoice,
    LoopedStage,
    looped_order,
    looped_placement,
    looped_warm_up,
)
from bapipe.schedule.validate import check, require_valid
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.simulate import simulate
from example_counts import examples

TIME = st.integers(1, 20)


@st.composite
def stages(draw: st.DrawFn) -> list[LoopedStage]:
    """Of two to four ranks with one to three stages each, every stage of its own."""
    counts = draw(st.lists(st.integers(1, 3), min_size=2, max_size=4))
    return [
        LoopedStage(
            rank=rank,
            forward=draw(TIME),
            backward=draw(TIME),
            send_forward=draw(st.integers(0, 6)),
            send_backward=draw(st.integers(0, 6)),
            inflight=draw(st.integers(0, 9)),
        )
        for (rank,) in looped_placement(counts)
    ]


def held(schedule: Schedule, own: list[LoopedStage]) -> list[tuple[int, float]]:
    """Activations of each rank at most, in number and in bytes."""
    found = []
    for lane in schedule.lanes:
        signs = [1 if kind == Kind.F else -1 for kind in lane.kinds.tolist()]
        sizes = [sign * own[stage].inflight for sign, stage in zip(signs, lane.stages.tolist(), strict=True)]
        found.append((max(itertools.accumulate(signs)), max(itertools.accumulate(sizes))))
    return found


def test_rounds_leave_out_ranks_that_have_all_their_stages() -> None:
    assert looped_placement((2, 2, 1)) == ((0,), (1,), (2,), (0,), (1,))
    assert looped_placement((3, 1)) == ((0,), (1,), (0,), (0,))
    assert looped_warm_up(looped_placement((2, 2, 2))) == [interleaved_warm_up(3, rank, 2) for rank in range(3)]
    assert looped_warm_up(looped_placement((2, 2, 1))) == [5, 3, 4]


def test_the_order_of_unequal_numbers() -> None:
    made = make_schedule("interleaved", 2, 3, virtual=(2, 1))
    assert made.placement == ((0,), (1,), (0,))
    assert [" ".join(f"{action}" for action in lane) for lane in made.lanes] == [
        "0F0 0F1 2F0 2B0 2F1 2B1 0B0 0F2 0B1 2F2 2B2 0B2",
        "1F0 1F1 1B0 1B1 1F2 1B2",
    ]


@pytest.mark.parametrize("counts", [(2, 1), (1, 2), (3, 1, 2), (2, 2, 1, 1), (1, 1, 3)])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8])
def test_every_rank_may_have_its_own_number(counts: tuple[int, ...], microbatches: int) -> None:
    made = make_schedule("interleaved", len(counts), microbatches, virtual=counts)
    assert [len(made.stages_of(rank)) for rank in range(len(counts))] == list(counts)
    require_valid(with_update(made), sends="windowed")


@pytest.mark.parametrize(("ranks", "virtual", "microbatches"), [(4, 2, 8), (4, 2, 16), (2, 2, 2)])
def test_of_equal_stages_the_first_choice_takes_as_long_as_the_published_order(
    ranks: int, virtual: int, microbatches: int
) -> None:
    published = make_schedule("interleaved", ranks, microbatches, virtual=virtual)
    costs = Costs.of(ranks * virtual, forward=1.0, backward=2.0)
    own = [LoopedStage(rank=rank, forward=1.0, backward=2.0) for (rank,) in looped_placement([virtual] * ranks)]
    _, seconds = looped_order(own, microbatches, LOOPED_CHOICES[0])
    assert seconds == pytest.approx(simulate(published, costs).time)


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(own=stages(), microbatches=st.integers(1, 8), choice=st.sampled_from(LOOPED_CHOICES))
def test_orders_are_right_and_take_what_they_say(
    own: list[LoopedStage], microbatches: int, choice: LoopedChoice
) -> None:
    made, seconds = looped_order(own, microbatches, choice)
    assert check(made) == []
    costs = Costs.of(
        len(own),
        forward=[item.forward for item in own],
        backward=[item.backward for item in own],
        transfer=[item.send_forward for item in own[:-1]],
        transfer_backward=[item.send_backward for item in own[1:]],
    )
    # A link takes one message after the other, so that the simulated time may be longer.
    assert simulate(made, costs).time >= seconds * (1 - 1e-9)
    free = Costs.of(len(own), forward=[item.forward for item in own], backward=[item.backward for item in own])
    assert simulate(made, free).time <= seconds * (1 + 1e-9)


@settings(max_examples=examples(40), deadline=None, derandomize=True)
@given(own=stages(), microbatches=st.integers(1, 8), rooms=st.integers(0, 40))
def test_memory_is_kept_to_but_for_what_a_rank_needs_to_go_on(
    own: list[LoopedStage], microbatches: int, rooms: int
) -> None:
    ranks = 1 + max(item.rank for item in own)
    made, _ = looped_order(own, microbatches, LOOPED_CHOICES[0], room=[float(rooms)] * ranks)
    assert check(made) == []
    for rank, (number, size) in enumerate(held(made, own)):
        largest = sum(item.inflight for item in own if item.rank == rank)
        assert size <= max(rooms, largest) + largest
        assert number >= 1


@pytest.mark.parametrize(
    ("virtual", "message"),
    [((2, 1, 1), "2 ranks need 2 numbers of stages, got 3"), ((2, 0), "at least 1 stage per rank, got 0")],
)
def test_mistakes(virtual: tuple[int, ...], message: str) -> None:
    with pytest.raises(BaPipeError, match=message):
        make_schedule("interleaved", 2, 4, virtual=virtual)


def test_no_closed_form_holds_for_unequal_numbers() -> None:
    made = make_schedule("interleaved", 2, 4, virtual=(3, 1))
    found = closed_form(made, Costs.of(4, forward=1.0, backward=2.0))
    assert found is None or not found.valid
