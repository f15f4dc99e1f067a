"""Dealings: who takes what, how many of it are in flight, and which is fastest."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapipe.errors import BaPipeError, ScheduleError
from bapipe.io.files import dump_json
from bapipe.schedule.actions import Kind, Schedule
from bapipe.schedule.dealing import (
    deal_by_speed,
    deal_evenly,
    dealt_counts,
    least_shared,
    most_in_a_row,
    own_microbatches,
    replica_taking,
    takers,
    widest_span,
)
from bapipe.schedule.generators import capped, make_schedule, with_recompute, with_update
from bapipe.schedule.schedule_file import ScheduleFile, read_schedule, write_schedule
from bapipe.schedule.validate import check, require_valid
from bapipe.simulator.action_costs import Costs, ReplicaCosts
from bapipe.simulator.simulate import simulate
from example_counts import examples


@st.composite
def dealt_pipelines(draw: st.DrawFn) -> Schedule:
    """Up to four stages of up to three replicas, each dealt in its own way."""
    stages, microbatches = draw(st.integers(1, 4)), draw(st.integers(3, 14))
    counts = draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
    caps = draw(st.lists(st.integers(1, 9), min_size=stages, max_size=stages))
    dealing = []
    for count in counts:
        length = draw(st.integers(count, microbatches))
        rest = draw(st.lists(st.integers(0, count - 1), min_size=length - count, max_size=length - count))
        every = draw(st.permutations([*range(count), *rest]))
        dealing.append(tuple(every) if draw(st.booleans()) else ())
    return capped(stages, microbatches, caps, replicas=counts, dealing=dealing)


@settings(max_examples=examples(150), deadline=None)
@given(dealt_pipelines())
def test_every_stage_takes_every_micro_batch_once_and_no_order_stops(schedule: Schedule) -> None:
    require_valid(schedule, sends="windowed")
    for stage, ranks in enumerate(schedule.placement):
        lanes = [lane for lane in schedule.lanes if lane.rank in ranks]
        for kind in (Kind.F, Kind.B):
            done = np.concatenate([lane.microbatches[lane.kinds == kind] for lane in lanes])
            assert sorted(done.tolist()) == list(range(schedule.num_microbatches))
        for replica, lane in enumerate(lanes):
            own = lane.microbatches[lane.kinds == Kind.F]
            assert len(own) == schedule.microbatch_counts(stage)[replica]
            assert {schedule.rank_of(stage, number) for number in own.tolist()} <= {lane.rank}
            held = np.cumsum(np.where(lane.kinds == Kind.F, 1, -1)).max(initial=0)
            cap = schedule.replica_cap(stage, replica)
            assert cap is not None
            assert held == min(cap, len(own))


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.integers(0, 2), min_size=3, max_size=12), st.integers(1, 30))
def test_shares_of_a_row(sequence: list[int], length: int) -> None:
    dealing, replicas = (*sequence, 0, 1, 2), 3
    long = takers(dealing, replicas, 4 * (length + len(dealing)))
    for replica in range(replicas):
        windows = np.lib.stride_tricks.sliding_window_view(long == replica, length)
        assert most_in_a_row(dealing, replicas, replica, length) == windows.sum(axis=1).max()
        own = np.flatnonzero(long == replica)
        assert widest_span(dealing, replicas, replica, 3) == (own[2:] - own[:-2]).max()
    shared = least_shared(dealing, replicas, 2)
    assert min(most_in_a_row(dealing, replicas, replica, shared) for replica in range(replicas)) == 2


@pytest.mark.parametrize("replicas", [1, 2, 3, 5])
def test_in_turn_is_micro_batch_modulo_replicas(replicas: int) -> None:
    for length in (1, 4, 7, 15):
        assert takers((), replicas, length).tolist() == [number % replicas for number in range(length)]
        assert most_in_a_row((), replicas, 0, length) == -(-length // replicas)
        assert sum(dealt_counts((), replicas, length)) == length
    assert replica_taking((), replicas, 11) == 11 % replicas
    assert own_microbatches((), replicas, 0, 6).tolist() == list(range(0, 6, replicas))


@pytest.mark.parametrize(
    ("seconds", "microbatches"),
    [
        ((1.0, 2.0), 7),
        ((0.282, 0.282, 0.525, 0.525), 16),
        ((3.0, 1.0), 5),
        ((1.0, 1.3, 2.1), 8),
        ((1.0, 5.0), 4),
    ],
)
def test_no_dealing_ends_sooner_than_by_speed(seconds: tuple[float, ...], microbatches: int) -> None:
    def ends(counts: tuple[int, ...]) -> float:
        return max(count * own for count, own in zip(counts, seconds, strict=True))

    found = dealt_counts(deal_by_speed(seconds, microbatches), len(seconds), microbatches)
    every = itertools.product(range(microbatches + 1), repeat=len(seconds))
    assert ends(found) == min(ends(counts) for counts in every if sum(counts) == microbatches)


def test_slices_of_two_sizes_take_five_and_three() -> None:
    dealing = deal_by_speed([0.282, 0.282, 0.525, 0.525], 16)
    assert dealt_counts(dealing, 4, 16) == (5, 5, 3, 3)
    assert deal_by_speed([1.0, 1.0, 1.0], 7) == deal_by_speed([1.0, 1.01], 8) == ()
    assert deal_by_speed([1.0, 2.0], 9) == (0, 0, 1)
    assert deal_evenly([6, 2]) == (0, 0, 0, 1)


def test_a_replica_takes_its_own_time() -> None:
    schedule = with_update(capped(1, 4, [1], replicas=[2], dealing=[(0, 0, 1, 0)]))

    def each(factor: float) -> ReplicaCosts:
        return ReplicaCosts(
            forward=factor,
            backward=2 * factor,
            input_gradient=factor,
            weight_gradient=factor,
            recompute=factor,
            update=factor / 10,
        )

    common = Costs.of(1, forward=3.0, backward=6.0, all_reduce=0.5, update=0.3)
    costs = Costs(
        **{
            **{name: getattr(common, name) for name in common.__dataclass_fields__},
            "replicas": ((each(1.0), each(3.0)),),
        }
    )
    assert simulate(schedule, common).time == pytest.approx(3 * 9.0 + 0.5 + 0.3)
    timeline = simulate(schedule, costs)
    assert timeline.time == pytest.approx(9.0 + 0.5 + 0.3)
    assert timeline.busy() == pytest.approx([9.1, 9.3])
    assert timeline.peak_in_flight_by_rank() == [1, 1]
    again = simulate(with_recompute(schedule), costs)
    assert again.time == pytest.approx(12.0 + 0.5 + 0.3)


def test_whole_pipelines_may_take_unequal_numbers() -> None:
    made = make_schedule("zb-h1", 2, 8, replicas=[2, 2], dealing=[(0, 0, 1, 0)] * 2)
    assert made.microbatch_counts(0) == made.microbatch_counts(1) == (6, 2)
    assert check(made, sends="windowed") == []
    alone = make_schedule("zb-h1", 2, 6)
    for stage in range(2):
        lane = next(lane for lane in made.lanes if lane.rank == 2 * stage)
        own = own_microbatches((0, 0, 1, 0), 2, 0, 8)
        assert lane.microbatches.tolist() == own[alone.lanes[stage].microbatches].tolist()
    with pytest.raises(BaPipeError, match="deal all stages alike"):
        make_schedule("zb-h1", 2, 8, replicas=[2, 2], dealing=[(0, 0, 1, 0), ()])


def test_a_file_has_it_only_where_it_is_not_in_turn(tmp_path: Path) -> None:
    turn = capped(2, 4, [2, 1], replicas=[2, 1])
    assert "dealing" not in dump_json(ScheduleFile.of(turn))
    dealt = capped(2, 4, [2, 1], replicas=[2, 1], dealing=[(0, 0, 1, 0), ()])
    write_schedule(dealt, tmp_path / "dealt.json")
    assert read_schedule(tmp_path / "dealt.json") == dealt != turn
    assert capped(2, 4, [2, 1], replicas=[2, 1], dealing=[(), ()]) == turn


@pytest.mark.parametrize(
    ("dealing", "message"),
    [
        ([(0, 2), ()], "names replicas 0 to 1 for at most 4"),
        ([(0, 0), ()], "gives replica 1 no micro-batch"),
        ([(0, 1, 0, 0, 0), ()], "for at most 4 micro-batches, got 5"),
    ],
)
def test_what_cannot_be_dealt_is_refused(dealing: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        capped(2, 4, [2, 1], replicas=[2, 1], dealing=dealing)
