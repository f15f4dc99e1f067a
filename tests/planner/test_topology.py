"""Plans by where accelerators are: levels and uplinks decide which of them follow one another."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from bapipe.hardware.cluster import Accelerator, Cluster, Level, Link, Uplink
from bapipe.planner import Request, explore
from bapipe.planner.assemble_plan import make_plan
from bapipe.planner.candidate import Hardware
from bapipe.planner.evaluate import Evaluation, evaluate
from bapipe.planner.local_moves import swapped_orders
from bapipe.planner.placements import accelerator_orders
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.reporting.views.cut_links import cut_links
from made_profiles import made_cluster, made_profile

PROFILE = made_profile(
    {"x": [1.0, 1.0, 2.0, 1.0, 1.5, 1.5]}, boundary=[4e8, 2e8, 6e8, 1e8, 3e8, 0], weights=[1e9] * 6, sizes=(1, 2)
)
ISLAND, WITHIN, BETWEEN = Link(bandwidth=5e10), Link(bandwidth=4e9), Link(bandwidth=1e9, latency=0.01)


def islands(*, uplink: float | None = None, places: str = "abab") -> Cluster:
    """Two nodes; accelerators of one letter are in one node, each node with an uplink or without."""
    flat = made_cluster({"x": len(places)})
    host = Level(
        name="host",
        over="accelerators",
        link=ISLAND,
        uplink=None if uplink is None else Uplink(bandwidth=uplink),
    )
    seen = dict.fromkeys(places, 0)
    placed = []
    for letter in places:
        placed.append(Accelerator(name=f"{letter}/{seen[letter]}", type="x", node=letter, groups=(letter,)))
        seen[letter] += 1
    return replace(flat, accelerators=tuple(placed), within=WITHIN, between=BETWEEN, levels=(host,))


def placed_anew(found: Evaluation, cluster: Cluster) -> list[float]:
    """Seconds of the same stages on every order of the accelerators."""
    stages = found.candidate.stages
    counts = [len(stage.accelerators) for stage in stages]
    times = []
    for order in itertools.permutations(range(len(cluster)), sum(counts)):
        ends = list(itertools.accumulate([0, *counts]))
        moved = tuple(
            replace(stage, accelerators=order[low:high])
            for stage, (low, high) in zip(stages, itertools.pairwise(ends), strict=True)
        )
        times.append(evaluate(replace(found.candidate, stages=moved), Hardware(cluster=cluster)).time)
    return times


@pytest.mark.parametrize("uplink", [None, 1.5e9, 3e8])
@pytest.mark.parametrize("places", ["abab", "aabb", "abcb"])
def test_no_other_order_of_the_accelerators_is_faster(uplink: float | None, places: str) -> None:
    cluster = islands(uplink=uplink, places=places)
    found = explore(PROFILE, cluster, Request(global_batch=8, schedule="1f1b")).best
    assert found.time <= min(placed_anew(found, cluster)) * (1 + 1e-9)


def test_orders_that_differ_only_in_names_of_groups_are_one() -> None:
    """Two nodes of two: together, or in turn, or one apart; a level does not tell more apart."""
    cluster = islands()
    orders = accelerator_orders(cluster, 4, most=100)
    assert orders is not None
    assert len(orders) == 3
    inside = replace(
        cluster,
        accelerators=tuple(
            replace(item, groups=(f"{item.node}{index // 2}",)) for index, item in enumerate(cluster.accelerators)
        ),
    )
    told = accelerator_orders(inside, 4, most=100)
    assert told is not None
    assert len(told) == 3


def test_replicas_are_tried_together_and_apart() -> None:
    cluster = islands(places="aaaabbbb")
    orders = swapped_orders(cluster, tuple(range(8)), most=100)
    assert (0, 4, 1, 5, 2, 6, 3, 7) in orders
    assert tuple(range(8)) in swapped_orders(cluster, (0, 4, 1, 5, 2, 6, 3, 7), most=100)


def test_a_narrow_uplink_makes_a_plan_slower_and_a_wide_one_does_not() -> None:
    times = {
        rate: explore(PROFILE, islands(uplink=rate), Request(global_batch=8, schedule="1f1b", stages=4)).best.time
        for rate in (None, 1e15, 1e9, 1e8)
    }
    assert times[1e15] == pytest.approx(times[None])
    assert times[1e15] <= times[1e9] < times[1e8]


def test_a_plan_names_its_links_and_its_timeline_is_what_was_predicted() -> None:
    cluster = islands(uplink=8e8)
    narrow = made_profile({"x": [1.0] * 4}, boundary=[4e9, 1e8, 4e9, 0])
    plan = make_plan(explore(narrow, cluster, Request(global_batch=8, schedule="1f1b", stages=4)))
    links = cut_links(plan)
    assert [link.names for link in links] == [("host",), ("between",), ("host",)]
    assert links[1].words == "between, 800 MB/s over the uplinks of host"
    assert plan_timeline(plan).time == pytest.approx(plan.prediction.time)


def test_a_link_of_one_pair_does_not_keep_parts_of_the_cluster_from_being_planned() -> None:
    """Half of the accelerators, whose plan two halves may copy, have not all pairs of the whole."""
    flat = made_cluster({"x": 4})
    names = [item.name for item in flat.accelerators]
    cluster = replace(flat, pairs={f"{names[1]} - {names[2]}": ISLAND}, within=WITHIN)
    assert cluster.part(cluster.accelerators[:2]).pairs == {}
    assert list(cluster.part(cluster.accelerators[1:]).pairs) == [f"{names[1]} - {names[2]}"]
    found = explore(PROFILE, cluster, Request(global_batch=16, microbatch=1))
    slower = explore(PROFILE, replace(cluster, pairs={}), Request(global_batch=16, microbatch=1))
    assert found.best.time <= slower.best.time * (1 + 1e-9)
