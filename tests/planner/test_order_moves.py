"""Quicker orders of the same stages, found by moving one action at a time."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from bapipe.costs.segments import make_chain
from bapipe.planner import Request, explore, make_plan
from bapipe.planner.candidate import Candidate, Hardware, StageChoice, accelerators_of_ranks, as_run, takes_moves
from bapipe.planner.candidate_costs import run_costs
from bapipe.planner.evaluate import Evaluation, evaluate
from bapipe.planner.order_moves import MoveEffort, quicker_order
from bapipe.planner.plan_network import network_of
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.planner.tuning import DEFAULT_TUNING
from bapipe.schedule.actions import Kind, Lane
from bapipe.schedule.inflight import v_activations
from bapipe.schedule.validate import require_valid
from bapipe.schedule.zero_bubble import zero_bubble
from bapipe.simulator.reordered import ReorderedSchedule
from made_profiles import made_cluster, made_profile

SPEND = MoveEffort(actions=1e6)
WITHOUT = replace(DEFAULT_TUNING, moved_orders=0)


def pipeline(seed: int, ranks: int, microbatches: int, *, memory: float = 1e9) -> tuple[Evaluation, Hardware]:
    """One layer on each accelerator, with random times of F, I and W, in zb's order for alike stages."""
    generator = np.random.default_rng(seed)
    profile = made_profile(
        {"x": generator.uniform(1, 4, ranks).tolist()},
        boundary=generator.uniform(0.1, 1.5, ranks).tolist(),
        saved_activations=[1.0] * ranks,
    )
    table = profile.table("x")
    shares = generator.uniform(0.2, 0.7, ranks)
    weight = tuple(tuple((np.array(row) * shares).tolist()) for row in table.backward)
    profile = replace(
        profile,
        accelerators={"x": replace(table, weight_gradient=weight, delayed=((0.5,) * ranks,) * len(weight))},
    )
    hardware = Hardware(cluster=made_cluster({"x": ranks}, bandwidth=1.0, memory=memory))
    candidate = Candidate(
        label="zb",
        chain=make_chain(profile, ["x"], 1),
        stages=tuple(StageChoice(first=own, last=own, accelerators=(own,)) for own in range(ranks)),
        schedule=replace(
            zero_bubble(ranks, microbatches, caps=[ranks - own for own in range(ranks)], delays=range(ranks)),
            name="zb",
        ),
    )
    return evaluate(candidate, hardware), hardware


def lane_orders(kinds: list[int]) -> Iterator[tuple[int, ...]]:
    """Every order of a rank's F, I and W: of each kind one micro-batch after the other, F before I before W."""
    before = {int(Kind.I): int(Kind.F), int(Kind.W): int(Kind.I)}
    tasks = {kind: [own for own, other in enumerate(kinds) if other == kind] for kind in (int(Kind.F), *before)}
    moved = sum(map(len, tasks.values()))

    def after(done: tuple[int, ...], counts: dict[int, int]) -> Iterator[tuple[int, ...]]:
        if len(done) == moved:
            yield (*done, *range(moved, len(kinds)))
            return
        for kind, own in tasks.items():
            number = counts[kind]
            if number < len(own) and (kind not in before or number < counts[before[kind]]):
                yield from after((*done, own[number]), counts | {kind: number + 1})

    yield from after((), dict.fromkeys(tasks, 0))


@pytest.mark.parametrize("seed", range(12))
def test_as_quick_as_the_best_of_all_orders(seed: int) -> None:
    """Two ranks, three micro-batches: 42 orders of each rank."""
    start, hardware = pipeline(seed, 2, 3)
    schedule = as_run(start.candidate)
    network = network_of(hardware.cluster, accelerators_of_ranks(start.candidate), schedule)
    graph = ReorderedSchedule(schedule, run_costs(start.candidate, hardware), network)
    rows = []
    for lane, (kinds, _, _) in zip(graph.order, graph.lanes(graph.order), strict=True):
        rows.append([tuple(lane[own] for own in order) for order in lane_orders(kinds.tolist())])
    assert [len(row) for row in rows] == [42, 42]
    timed = [graph.timed(order) for order in itertools.product(*rows)]
    best = min(own.seconds for own in timed if own is not None)
    found = quicker_order(start, hardware, DEFAULT_TUNING, spend=SPEND)
    assert (found or start).time == pytest.approx(best, rel=1e-9)


def test_half_of_these_get_quicker() -> None:
    found = [quicker_order(*pipeline(seed, 2, 3), DEFAULT_TUNING, spend=SPEND) for seed in range(12)]
    assert sum(own is not None for own in found) >= 6


@pytest.mark.parametrize("seed", range(6))
def test_a_quicker_order_is_valid_and_predicted_as_any(seed: int) -> None:
    start, hardware = pipeline(seed, 4, 8)
    found = quicker_order(start, hardware, DEFAULT_TUNING, spend=SPEND)
    if found is None:
        return
    assert found.time < start.time
    for lane, other in zip(found.schedule.lanes, start.schedule.lanes, strict=True):
        assert sorted(map(str, lane)) == sorted(map(str, other))
    require_valid(found.schedule, sends="windowed")
    assert evaluate(found.candidate, hardware).time == found.time


def test_more_memory_is_held_only_where_it_saves_enough() -> None:
    """Where every order must save all of the time, only those that hold no more are found."""
    for seed in range(6):
        start, hardware = pipeline(seed, 4, 8)
        found = quicker_order(start, hardware, replace(DEFAULT_TUNING, moves_worth_memory=1.0), spend=SPEND)
        assert found is None or max(found.memory) <= max(start.memory)


def test_no_more_is_held_than_there_is_room_for() -> None:
    free, _ = pipeline(3, 4, 8)
    tight = max(free.memory) * 1.001
    start, hardware = pipeline(3, 4, 8, memory=tight)
    found = quicker_order(start, hardware, DEFAULT_TUNING, spend=SPEND)
    assert start.short is None
    assert found is None or (found.short is None and max(found.memory) <= tight)


def test_nothing_is_tried_without_effort() -> None:
    start, hardware = pipeline(0, 2, 3)
    assert quicker_order(start, hardware, DEFAULT_TUNING, spend=SPEND) is not None
    for spend in (MoveEffort(actions=0), MoveEffort(actions=1e6, seconds=-1.0)):
        assert quicker_order(start, hardware, DEFAULT_TUNING, spend=spend) is None


def test_only_orders_of_which_a_name_allows_many_are_moved() -> None:
    start, _ = pipeline(0, 4, 8)
    own = start.candidate
    assert takes_moves(own, most=32)
    assert not takes_moves(own, most=31)
    assert not takes_moves(replace(own, schedule=replace(own.schedule, name="zb-h1")), most=32)
    assert not takes_moves(replace(own, copies=2), most=32)
    again = tuple(replace(stage, recompute=True) for stage in own.stages)
    assert not takes_moves(replace(own, stages=again), most=32)


def most_held(lane: Lane) -> int:
    """Activations of a rank at once, from F to the end of their backward."""
    changes = {Kind.F: 1, Kind.B: -1, Kind.W: -1}
    return max(itertools.accumulate(changes.get(action.kind, 0) for action in lane))


@pytest.mark.parametrize("schedule", ["zb", "zb-v", "v-half", "interleaved"])
def test_plans_get_faster_and_never_slower(schedule: str) -> None:
    gains = []
    for seed in (0, 3):
        generator = np.random.default_rng(seed)
        work, boundary = generator.uniform(1, 6, 12).tolist(), generator.uniform(0.5, 5, 12).tolist()
        profile = made_profile({"x": work, "y": [own / 1.8 for own in work]}, boundary=boundary)
        request = Request(global_batch=8, microbatch=1, schedule=schedule)
        if schedule == "zb":
            request = replace(request, global_batch=12, stages=4)
        cluster = made_cluster({"x": 2, "y": 2}, bandwidth=4.0)
        found, before = (explore(profile, cluster, request, tuning=own) for own in (DEFAULT_TUNING, WITHOUT))
        gains.append(before.best.time / found.best.time - 1)
        require_valid(found.best.schedule, sends="windowed")
        if schedule == "v-half":
            assert max(map(most_held, found.best.candidate.schedule.lanes)) <= v_activations("v-half", 4)
        plan = make_plan(found)
        assert plan_timeline(plan).time == pytest.approx(plan.prediction.time, rel=1e-9)
    assert min(gains) >= -1e-12
    assert max(gains) > 0.002
