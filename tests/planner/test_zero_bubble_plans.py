"""Plans that put weight gradients off: as far as memory allows, and no further than pays."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bapipe.costs.profile import Profile
from bapipe.errors import InfeasibleError
from bapipe.planner import Request, explore, make_plan
from bapipe.planner.candidate import Hardware
from bapipe.planner.evaluate import evaluate
from bapipe.planner.inflight_caps import least_caps
from bapipe.planner.tuning import DEFAULT_TUNING
from bapipe.schedule.actions import Kind
from bapipe.schedule.validate import check
from bapipe.schedule.zero_bubble import zero_bubble
from bapipe.units import format_bytes
from made_profiles import made_cluster, made_profile

LAYERS, SAVED, WEIGHTS = 4, 10.0, 1.0
REQUEST = Request(global_batch=16, microbatch=1, stages=LAYERS)


def profile_with(*, delayed: float | None, weight_share: float = 0.5) -> Profile:
    made = made_profile(
        {"x": [3.0] * LAYERS},
        saved_activations=[SAVED] * LAYERS,
        weights=[WEIGHTS] * LAYERS,
        boundary=[1.0] * LAYERS,
    )
    table = made.table("x")
    return replace(
        made,
        accelerators={
            "x": replace(
                table,
                delayed=delayed and tuple((size * delayed,) * LAYERS for size in table.microbatches),
                weight_gradient=tuple(tuple(value * weight_share for value in row) for row in table.backward),
            )
        },
    )


def planned(profile: Profile, memory: float, schedule: str):  # type: ignore[no-untyped-def]
    cluster = made_cluster({"x": LAYERS}, memory=memory, bandwidth=2.0)
    return explore(profile, cluster, replace(REQUEST, schedule=schedule, recompute="stages")).best


def behind(schedule) -> list[int]:  # type: ignore[no-untyped-def]
    """Most weight gradients that wait at once, per stage."""
    most = []
    for lane in schedule.lanes:
        waiting, peak = 0, 0
        for action in lane:
            waiting += {Kind.I: 1, Kind.W: -1}.get(action.kind, 0)
            peak = max(peak, waiting)
        most.append(peak)
    return most


def test_weight_gradients_wait_as_long_as_memory_allows() -> None:
    """Less memory, shorter delays, more time; never more memory than there is."""
    profile, found = profile_with(delayed=SAVED), []
    for memory in (60.0, 80.0, 100.0, 120.0, 1e9):
        best = planned(profile, memory, "zb")
        assert max(best.memory) <= memory
        found.append((behind(best.schedule), best.time))
    assert [time for _, time in found] == sorted((time for _, time in found), reverse=True)
    assert found[0][1] > found[-1][1]
    assert max(found[0][0]) < max(found[-1][0])


def test_it_fits_where_alike_depths_do_not() -> None:
    profile = profile_with(delayed=SAVED)
    free = planned(profile, 1e9, "zb-h2")
    tight = max(free.memory) - 1
    with pytest.raises(InfeasibleError):
        planned(profile, tight, "zb-h2")
    best = planned(profile, tight, "zb")
    assert best.short is None
    assert best.time < planned(profile, tight, "1f1b").time


def test_what_is_let_go_counts() -> None:
    light, heavy = (planned(profile_with(delayed=size), 1e9, "zb-h2") for size in (SAVED / 10, SAVED))
    unknown = planned(profile_with(delayed=None), 1e9, "zb-h2")
    assert light.time == heavy.time == unknown.time
    assert heavy.memory == unknown.memory
    # The last stage holds one micro-batch whole and six that wait for their weight gradients.
    assert heavy.memory[-1] - light.memory[-1] == pytest.approx(6 * SAVED * 9 / 10)


def test_nothing_waits_where_there_is_nothing_to_defer() -> None:
    best = planned(profile_with(delayed=SAVED, weight_share=0.001), 1e9, "zb")
    assert behind(best.schedule) == [1] * LAYERS


def test_of_plans_as_fast_the_lightest_is_taken() -> None:
    """The last layer is the largest and has no weights: zb-h2 holds its activations all the same, zb does not.

    With so many micro-batches no order is made for the times of the stages, which would be faster than both; so
    would be what is found by simulation.
    """
    profile = profile_with(delayed=None)
    table = profile.table("x")
    large = replace(
        table,
        saved_activations=tuple((*row[:-1], 3 * row[-1]) for row in table.saved_activations),
        weight_gradient=tuple((*row[:-1], 0.0) for row in table.weight_gradient or ()),
    )
    cluster = made_cluster({"x": LAYERS}, memory=1e9, bandwidth=2.0)
    many = replace(REQUEST, global_batch=DEFAULT_TUNING.order_size)
    tuning = replace(DEFAULT_TUNING, search_steps=0)
    found = explore(replace(profile, accelerators={"x": large}), cluster, many, tuning=tuning)
    level = [item for item in found.considered if item.throughput > found.best.throughput * (1 - 1e-9)]
    assert len(level) > 1
    assert max(found.best.memory) == min(max(item.memory) for item in level)
    plan = make_plan(found)
    alternative = next(item for item in plan.alternatives if item.name.startswith("zb-h2"))
    assert alternative.reason == f"as fast; {format_bytes(alternative.memory_bytes - max(found.best.memory))} more"


def test_a_plan_for_another_optimizer_than_was_timed_says_so() -> None:
    profile = profile_with(delayed=None)
    cluster = made_cluster({"x": LAYERS})
    for timed, wanted, told in (("sgd", "adam", True), ("adamw", "adam", False), ("sgd", "sgd", False)):
        tables = {"x": replace(profile.table("x"), optimizer=timed)}
        request = replace(REQUEST, optimizer=wanted)  # type: ignore[arg-type]
        plan = make_plan(explore(replace(profile, accelerators=tables), cluster, request))
        note = (
            f"the optimizer step is timed with {timed} but planned for {wanted}: profile with --optimizer {wanted}"
        )
        assert (note in plan.notes) is told


def test_an_order_made_for_the_stages_is_faster_where_they_differ() -> None:
    """Only the first layer and the last have weight gradients to put off."""
    profile = profile_with(delayed=SAVED)
    table = profile.table("x")
    uneven = tuple((row[0], 0.0, 0.0, row[-1]) for row in table.weight_gradient or ())
    cluster = made_cluster({"x": LAYERS}, memory=1e9, bandwidth=2.0)
    made = replace(profile, accelerators={"x": replace(table, weight_gradient=uneven)})
    best = explore(made, cluster, replace(REQUEST, schedule="zb")).best
    stages = best.candidate.stages
    caps = least_caps(best.candidate.chain, stages, 16, Hardware(cluster=cluster))
    pattern = zero_bubble(LAYERS, 16, caps, delays=[max(0, caps[0] - caps[-1]), 0, 0, caps[0] - caps[-1]])
    usual = evaluate(replace(best.candidate, schedule=pattern), Hardware(cluster=cluster))
    assert best.time < 0.99 * usual.time
    assert check(best.candidate.schedule) == []


def test_cuts_move_where_that_shortens_the_order() -> None:
    """The middle layers have nothing to put off, so the ends can have more of the work."""
    made = made_profile(
        {"x": [6.0] * LAYERS}, saved_activations=[1.0] * LAYERS, split=dict.fromkeys(range(LAYERS), 12)
    )
    table = made.table("x")
    uneven = tuple((0.5 * row[0], 0.0, 0.0, 0.5 * row[-1]) for row in table.backward)
    profile = replace(made, accelerators={"x": replace(table, weight_gradient=uneven)})
    cluster = made_cluster({"x": LAYERS})
    whole, divided = (
        explore(profile, cluster, replace(REQUEST, schedule="zb", split_layers=split)).best
        for split in (False, True)
    )
    assert divided.time < 0.99 * whole.time
    first, *_, last = (
        sum(float(divided.candidate.chain.work[0, unit]) for unit in range(stage.first, stage.last + 1))
        for stage in divided.candidate.stages
    )
    assert max(first, last) > 6.0
