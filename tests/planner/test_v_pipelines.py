"""Plans whose accelerators hold two stages each, placed in a V."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bapipe.costs.peak_memory import message_bytes
from bapipe.errors import BaPipeError, InfeasibleError
from bapipe.planner import Request, explore, make_plan
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.planner.search import Exploration
from bapipe.planner.tuning import DEFAULT_TUNING
from bapipe.records.plan import read_plan, write_plan
from bapipe.schedule.inflight import v_activations
from bapipe.schedule.v_shape import V_SHAPED, v_placement
from bapipe.schedule.validate import check
from made_profiles import made_cluster, made_profile

RANKS, LAYERS = 3, 12
WORK = [0.3, *[1.0, 1.4] * 5, 2.5]
"""a light first layer and a heavy last one, as of a language model"""


def explored(
    schedule: str | None, *, work: list[float] = WORK, memory: float = 1e9, ranks: int = RANKS, **more: Any
) -> Exploration:
    count = len(work)
    profile = made_profile(
        {"x": work}, saved_activations=[10.0] * count, weights=[4.0] * count, boundary=[1.0] * count
    )
    request = Request(global_batch=8, microbatch=1, schedule=schedule, **more)
    return explore(profile, made_cluster({"x": ranks}, memory=memory, bandwidth=20.0), request)


@pytest.fixture(scope="module")
def found() -> dict[str, Exploration]:
    return {name: explored(name) for name in V_SHAPED}


@pytest.mark.parametrize("name", V_SHAPED)
def test_plans_are_placed_in_a_v_and_hold_what_is_published(name: str, found: dict[str, Exploration]) -> None:
    best = found[name].best
    schedule = best.candidate.schedule
    assert (schedule.name, schedule.placement) == (name, v_placement(RANKS))
    assert best.candidate.label == f"{name}, {RANKS} accelerators with 2 stages each"
    assert check(best.schedule, sends="windowed") == []
    assert 2 * max(best.timeline.peak_activations()) <= v_activations(name, RANKS)


@pytest.mark.parametrize("name", V_SHAPED)
def test_plan_files_say_the_same(name: str, found: dict[str, Exploration], tmp_path: Path) -> None:
    plan = make_plan(found[name])
    write_plan(plan, tmp_path / "plan.json")
    again = read_plan(tmp_path / "plan.json")
    assert again == plan
    assert [stage.accelerators for stage in again.stages[:RANKS]] == [
        stage.accelerators for stage in reversed(again.stages[RANKS:])
    ]
    assert plan_timeline(again).time == pytest.approx(found[name].best.timeline.time)


def test_accelerators_have_as_much_to_do(found: dict[str, Exploration]) -> None:
    """The light first stage and the heavy last one are on one accelerator."""
    for name in ("zb-v", "dualpipe-v"):
        costs = found[name].best.costs
        work = [forward + backward for forward, backward in zip(costs.forward, costs.backward, strict=True)]
        both = [work[rank] + work[-1 - rank] for rank in range(RANKS)]
        assert max(both) <= 1.15 * sum(WORK) / RANKS


def test_more_memory_is_never_slower(found: dict[str, Exploration]) -> None:
    times = [found[name].best.time for name in ("zb-v", "v-half", "v-min")]
    assert times == sorted(times)


def test_nothing_is_sent_at_the_turn(found: dict[str, Exploration]) -> None:
    """A value that is handed on within a rank is held once each way, one that is sent four times."""
    best = found["zb-v"].best
    held = message_bytes(best.schedule, best.stage_bytes)
    assert held[RANKS - 1] == held[RANKS] == 1 + 4
    assert held[1] == 4 + 4


def test_schedules_that_hold_less_fit_where_others_do_not() -> None:
    most = {name: max(explored(name).best.memory) for name in ("zb-v", "v-min")}
    tight = most["v-min"] + 1
    assert tight < most["zb-v"]
    assert max(explored("v-min", memory=tight, recompute="never").best.memory) <= tight
    with pytest.raises(InfeasibleError, match="nothing fits"):
        explored("dualpipe-v", memory=tight, recompute="never")


def test_zb_v_is_among_the_alternatives_and_those_that_hold_less_where_it_does_not_fit() -> None:
    """With many micro-batches only the published orders are tried, which do not look at the memory."""
    profile = made_profile({"x": WORK}, saved_activations=[10.0] * LAYERS, weights=[4.0] * LAYERS)
    for memory, wanted in ((1e9, {"zb-v"}), (200.0, {"zb-v", "v-half"})):
        request = Request(global_batch=100, microbatch=1)
        found = explore(profile, made_cluster({"x": RANKS}, memory=memory), request)
        assert {own.candidate.schedule.name for own in found.considered} & set(V_SHAPED) == wanted


def test_an_order_is_made_for_the_memory_that_there_is() -> None:
    """zb-v itself fits into less than its published order holds, by holding less."""
    most = max(explored("zb-v").best.memory)
    best = explored("zb-v", memory=0.8 * most).best
    assert max(best.memory) <= 0.8 * most


def test_fewer_accelerators_are_used_where_layers_are_few() -> None:
    best = explored("zb-v", work=[1.0] * 5, ranks=4).best
    assert [len(stage.accelerators) for stage in best.candidate.stages] == [2] * 4
    assert best.candidate.schedule.num_ranks == 4


@pytest.mark.parametrize(
    ("schedule", "more", "message"),
    [
        ("zb-v", {"ranks": 1}, "zb-v needs at least 2 accelerators, the cluster has 1"),
        ("v-half", {"stages": 1}, "v-half needs at least 2 stages"),
        ("v-min", {"work": [1.0] * 3}, "v-min needs at least 4 layers"),
        ("dualpipe-v", {"work": [1.0] * 5, "stages": 3}, "two stages on each of 3 accelerators need 6 layers"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(schedule: str, more: dict[str, object], message: str) -> None:
    with pytest.raises(BaPipeError, match=message) as error:
        explored(schedule, **more)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("schedule", ["zb-v", "v-half", "dualpipe-v"])
def test_faster_accelerators_have_more_to_do(schedule: str) -> None:
    """Two types of which one is twice as fast: each rank's two stages take about as long as another's."""
    work = [1.0] * 24
    profile = made_profile({"x": work, "y": [2.0] * 24})
    cluster = made_cluster({"x": 2, "y": 2}, bandwidth=1e6)
    best = explore(profile, cluster, Request(global_batch=16, microbatch=1, schedule=schedule)).best
    assert best.schedule.placement == ((0,), (1,), (2,), (3,), (3,), (2,), (1,), (0,))
    layers = dict.fromkeys(range(4), 0)
    for stage in best.candidate.stages:
        layers[stage.accelerators[0]] += stage.last - stage.first + 1
    assert layers == {0: 8, 1: 8, 2: 4, 3: 4}
    assert [max(own.forward) / min(own.forward) < 2.5 for own in (best.costs,)] == [True]
    slow = explore(profile, made_cluster({"y": 4}), Request(global_batch=16, microbatch=1, schedule=schedule)).best
    assert best.time < 0.75 * slow.time
    plan = make_plan(explore(profile, cluster, Request(global_batch=16, microbatch=1, schedule=schedule)))
    assert plan_timeline(plan).time == pytest.approx(plan.prediction.time)


def test_parting_is_part_of_the_choice() -> None:
    """Where a backward in two parts takes longer, zb-v gives way: DualPipeV, which parts few, is faster."""
    profile = made_profile({"x": [1.0] * LAYERS})
    table = profile.table("x")
    slow = replace(table, parting=tuple(tuple(0.5 * value for value in row) for row in table.backward))
    costly = replace(profile, accelerators={"x": slow})
    cluster = made_cluster({"x": 2})
    times = {
        name: explore(costly, cluster, Request(global_batch=16, microbatch=1, schedule=name)).best.time
        for name in ("zb-v", "dualpipe-v")
    }
    assert times["dualpipe-v"] < times["zb-v"]
    free = explore(costly, cluster, Request(global_batch=16, microbatch=1))
    assert free.best.candidate.schedule.name != "zb-v"


@pytest.mark.parametrize("schedule", ["zb-v", "interleaved"])
def test_moved_cuts_and_orders_for_times_near_these_make_plans_faster(schedule: str) -> None:
    """Orders of unequal stages: without the two the same search finds slower plans, never faster ones."""
    usual = replace(DEFAULT_TUNING, moved_orders=0)
    tuning = replace(usual, v_order_actions=0, time_variations=0, looped_orders=0, looped_actions=0)
    gains = []
    for seed in (1, 4):
        generator = np.random.default_rng(seed)
        work, boundary = generator.uniform(1, 6, 12).tolist(), generator.uniform(0.5, 5, 12).tolist()
        profile = made_profile({"x": work, "y": [own / 1.8 for own in work]}, boundary=boundary)
        request = Request(global_batch=6, microbatch=1, schedule=schedule)
        cluster = made_cluster({"x": 2, "y": 1}, bandwidth=1.0)
        own, before = (explore(profile, cluster, request, tuning=item).best for item in (usual, tuning))
        gains.append(before.time / own.time - 1)
    assert min(gains) >= -1e-12
    assert max(gains) > 0.01
