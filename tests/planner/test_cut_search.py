"""The search by simulation: what it lists, what it rules out, and how far an effort goes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from bapipe.costs.segments import make_chain
from bapipe.errors import BaPipeError, InfeasibleError
from bapipe.hardware.cluster import Cluster, Link
from bapipe.planner import Request, explore, make_plan
from bapipe.planner.candidate import Hardware
from bapipe.planner.effort import effort_of
from bapipe.planner.evaluate import evaluate
from bapipe.planner.fixed_partitions import paper_candidate
from bapipe.planner.inputs import cluster_with, profile_for
from bapipe.planner.lightest_cuts import fitting_and_lightest_cuts
from bapipe.planner.order_space import OrderSpace, order_spaces
from bapipe.planner.pipelines import FAMILIES, build, unreplicated_stages
from bapipe.planner.placements import accelerator_orders, replica_counts
from bapipe.planner.stage_tables import StageTables
from bapipe.planner.tuning import DEFAULT_TUNING
from bapipe.schedule.generators import with_update
from bapipe.schedule.validate import require_valid
from command import bapipe
from made_profiles import made_cluster, made_profile

WORK = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
BOUNDARY = [0.5, 2.0, 0.1, 0.9, 0.2, 0.3, 1.0, 0.0]


def nodes(*kinds: str, bandwidth: float = 4.0) -> Cluster:
    """One accelerator of each kind, two to a node."""
    made = made_cluster({kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}, bandwidth=bandwidth)
    placed = tuple(
        replace(item, type=kind, node=f"n{index // 2}")
        for index, (item, kind) in enumerate(zip(made.accelerators, kinds, strict=True))
    )
    return replace(made, accelerators=placed, between=Link(bandwidth=bandwidth / 4))


def test_every_way_to_deal_accelerators_is_listed_once() -> None:
    found = list(replica_counts(4, stages=None, most_stages=3, replicas=True))
    assert len(found) == len(set(found)) == 2**4 - 1 - 1  # all compositions of 1 to 4, but four stages
    assert list(replica_counts(4, stages=3, most_stages=8, replicas=True)) == [(1, 1, 1)]
    assert list(replica_counts(3, stages=None, most_stages=8, replicas=False)) == [(1, 1, 1), (1, 1), (1,)]


def test_orders_differ_in_type_or_node() -> None:
    assert accelerator_orders(made_cluster({"x": 4}), 3, most=10) == [(0, 1, 2)]
    assert len(accelerator_orders(made_cluster({"x": 2, "y": 2}), 4, most=10) or []) == 6
    assert len(accelerator_orders(nodes("x", "x", "x", "x"), 4, most=10) or []) == 3
    assert accelerator_orders(made_cluster({"x": 4}, topology="chain"), 3, most=10) == [(0, 1, 2), (1, 2, 3)]
    assert accelerator_orders(made_cluster({"x": 4, "y": 4}), 8, most=10) is None


@pytest.mark.parametrize("name", ["1f1b", "zb", "1f1b-so", "gpipe", "zb-h1"])
def test_no_stage_has_more_in_flight_than_the_one_before(name: str) -> None:
    (space,) = order_spaces(Request(schedule=name))
    counts = (1, 1, 1) if name != "1f1b" else (1, 2, 1)
    orders = list(space.every(counts, 5))
    assert len(orders) == len(set(orders)) <= space.size(counts, 5)
    for order in [*orders, *space.usual(counts, 5), *space.near(orders[0], counts, 5)]:
        assert order.schedule.num_microbatches == 5
        assert order.schedule.name == name
        if space.chooses:
            assert all(before >= min(after, 5) for before, after in itertools.pairwise(order.caps))


@pytest.mark.parametrize("memory", [60.0, 90.0])
def test_the_lightest_cuts_lack_least(memory: float) -> None:
    profile = made_profile(
        {"x": WORK}, boundary=BOUNDARY, weights=WORK[::-1], saved_activations=[value**1.3 for value in WORK]
    )
    hardware = Hardware(cluster=made_cluster({"x": 3}, memory=memory))
    chain, members = make_chain(profile, ("x",), 1), (0, 1, 2)
    order = next(OrderSpace(name="1f1b-so").usual((1, 1, 1), 6))
    every = {}
    for ends in itertools.combinations(range(len(WORK) - 1), 2):
        stages = unreplicated_stages((*ends, len(WORK) - 1), members)
        found = evaluate(build(chain, stages, FAMILIES["1f1b-so"], 6, hardware), hardware)
        every[(*ends, len(WORK) - 1)] = (
            max(np.subtract(found.memory, found.capacity)),
            max(found.stage_seconds.work),
        )
    tables = StageTables(chain)
    best, lightest = fitting_and_lightest_cuts(tables, hardware, members, order)
    assert every[lightest][0] == pytest.approx(min(lack for lack, _ in every.values()))
    fitting = [longest for lack, longest in every.values() if lack <= 0]
    assert (best is None) == (not fitting)
    request = Request(global_batch=6, microbatch=1)
    paper = paper_candidate(chain, hardware, FAMILIES["1f1b-so"], 6, request, fitting=True)
    assert paper is not None or not fitting, "what fits is not passed over"
    if best is not None:
        assert every[best][1] == pytest.approx(min(fitting))


def test_more_memory_is_never_slower_and_what_fits_is_not_refused() -> None:
    """ResNet-50 over slow links: what stages send and hold depends on the cut."""
    times = []
    for limit in ("4.1GB", "4.35GB", "4.9GB", "6GB", "8GB", "12GB"):
        cluster = cluster_with("4xv100", memory_limit=limit, link_bandwidth="1.6GB/s")
        profile = profile_for("resnet50", cluster, microbatch=32, precision=None)
        request = Request(global_batch=512, microbatch=32, schedule="1f1b-so", stages=4)
        times.append(explore(profile, cluster, request).best.time)
    assert times == sorted(times, reverse=True)
    assert times[0] < 0.9, "without layers that recompute it was 1.537"
    assert times[-1] < 0.86


@pytest.mark.parametrize("thorough", [5_000, 10])
def test_nothing_is_refused_before_the_lightest_cuts_were_tried(thorough: int) -> None:
    """Some messages are so large that few cuts fit, which sums over units do not see."""
    rng, count = np.random.default_rng(2), 24
    boundary = np.where(rng.random(count) < 0.5, 20.0, 1.0)
    work, saved, weights = (rng.uniform(0.5, most, count).tolist() for most in (2, 3, 3))
    profile = made_profile({"x": work}, boundary=boundary.tolist(), saved_activations=saved, weights=weights)
    request = Request(global_batch=8, microbatch=1, stages=4, schedule="1f1b-so")
    tuning = replace(DEFAULT_TUNING, thorough_size=thorough)
    memory = float(rng.uniform(50, 130))
    assert explore(profile, made_cluster({"x": 4}, memory=memory), request, tuning=tuning).best.short is None
    with pytest.raises(InfeasibleError, match="nothing fits"):
        explore(profile, made_cluster({"x": 4}, memory=memory / 3), request, tuning=tuning)


def test_a_stage_may_have_replicas_of_two_types() -> None:
    profile = made_profile({"x": [1.0, 2.0], "y": [1.1, 2.2], "z": [1.2, 2.4]}, boundary=[0.1, 0.0])
    cluster = made_cluster({"x": 1, "y": 1, "z": 1}, bandwidth=40.0)
    request = Request(global_batch=6, microbatch=1, schedule="1f1b")
    first, second = explore(profile, cluster, request).best.candidate.stages
    assert (first.accelerators, set(second.accelerators)) == ((2,), {0, 1})
    without = explore(profile, cluster, request, tuning=replace(DEFAULT_TUNING, search_steps=0))
    assert len(without.best.candidate.stages[1].accelerators) == 1


def test_plans_near_the_best_are_found_where_all_are_too_many() -> None:
    rng = np.random.default_rng(1)
    profile = made_profile(
        {"x": rng.lognormal(0.0, 0.8, 24).tolist(), "y": rng.lognormal(0.3, 0.8, 24).tolist()},
        boundary=rng.lognormal(0.0, 1.0, 24).tolist(),
    )
    cluster = made_cluster({"x": 3, "y": 3}, bandwidth=1.0)
    request = Request(global_batch=6, microbatch=1, stages=6, schedule="1f1b-sno")
    none = explore(profile, cluster, request, tuning=replace(DEFAULT_TUNING, search_steps=0))
    found = [explore(profile, cluster, request) for _ in range(2)]
    assert found[0].best.time < none.best.time
    assert found[0].best.candidate.stages == found[1].best.candidate.stages
    assert found[0].left_out is not None
    assert found[0].left_out > 0


def test_half_duplex_links_are_simulated_one_by_one() -> None:
    profile = made_profile({"x": WORK[:5]}, boundary=BOUNDARY[:5])
    cluster = made_cluster({"x": 3})
    cluster = replace(cluster, within=Link(bandwidth=1.0, duplex="half"))
    request = Request(global_batch=4, microbatch=1, schedule="1f1b-so", stages=3)
    found = explore(profile, cluster, request)
    hardware = found.hardware
    times = []
    for ends in itertools.combinations(range(4), 2):
        stages = unreplicated_stages((*ends, 4), (0, 1, 2))
        times.append(
            evaluate(build(found.best.candidate.chain, stages, FAMILIES["1f1b-so"], 4, hardware), hardware).time
        )
    assert found.best.time == pytest.approx(min(times), rel=DEFAULT_TUNING.as_fast)


def test_an_effort_is_a_word_or_a_time() -> None:
    assert effort_of("low", DEFAULT_TUNING).steps < effort_of("normal", DEFAULT_TUNING).steps
    assert effort_of(2.5, DEFAULT_TUNING).seconds == 2.5
    assert effort_of("high", DEFAULT_TUNING).seconds == math.inf
    for wrong in ("hihg", 0.0, math.nan, 1e9):
        with pytest.raises(BaPipeError, match="effort"):
            Request(effort=wrong)
    done = bapipe("plan", "vgg16", "--cluster", "2xv100", "--effort", "hihg")
    assert done.returncode == 2
    assert done.stderr == (
        "bapipe: unknown effort 'hihg' (did you mean 'high'?); give low, normal, high or seconds\n"
    )


def test_progress_says_what_may_still_be_gained() -> None:
    told: list[tuple[str, float]] = []
    profile = made_profile({"x": WORK}, boundary=BOUNDARY)
    found = explore(
        profile,
        made_cluster({"x": 4}, bandwidth=1.0),
        Request(global_batch=6, microbatch=1, effort="high", schedule="1f1b"),
        progress=lambda *what: told.append(what),
    )
    assert told
    assert all("at most" in words and 0 <= share <= 1 for words, share in told)
    assert any("no other cuts" in note for note in make_plan(found).notes)


@pytest.mark.parametrize("name", ["1f1b", "zb"])
def test_every_order_that_is_tried_can_be_run(name: str) -> None:
    """None deadlocks on channels that hold two messages, as those of a run do."""
    (space,) = order_spaces(Request(schedule=name))
    for counts in replica_counts(4, stages=None, most_stages=4, replicas=True):
        if space.allows(counts):
            for order in itertools.islice(space.every(counts, 5), 0, None, 7):
                require_valid(with_update(order.schedule), sends="windowed")


@pytest.mark.parametrize(
    ("work", "saved", "weights", "boundary"),
    [
        ([3.0, 1.0, 5.0], [1.0, 2.0, 2.0], [2.0, 2.0, 1.0], [0.0, 1.0, 0.0]),
        ([2.0, 5.0, 5.0], [2.0, 2.0, 2.0], [1.0, 1.0, 3.0], [2.0, 2.0, 0.0]),
        ([1.0, 2.0, 5.0], [4.0, 2.0, 4.0], [2.0, 1.0, 1.0], [0.0, 2.0, 0.0]),
    ],
)
def test_more_memory_is_never_slower_where_recomputation_pays(
    work: list[float], saved: list[float], weights: list[float], boundary: list[float]
) -> None:
    """With more memory a plan without recomputation fits, which is slower than the one with it."""
    profile = made_profile({"x": work}, boundary=boundary, weights=weights, saved_activations=saved, sizes=(1,))
    before = 0.0
    for memory in (14, 16, 18, 20, 24, 28, 32):
        cluster = made_cluster({"x": 2}, bandwidth=1.0, memory=float(memory))
        try:
            found = explore(profile, cluster, Request(global_batch=6, schedule="1f1b")).best.throughput
        except InfeasibleError:
            found = 0.0
        assert found >= before * (1 - 1e-3)
        before = found


def test_one_stage_may_have_fewer_replicas_than_there_are_accelerators() -> None:
    """Eight micro-batches do not go round five replicas, but they go round four."""
    assert list(replica_counts(3, stages=1, most_stages=8, replicas=True)) == [(3,), (2,), (1,)]
    profile = made_profile({"x": [1.0, 1.0]}, weights=[1.0, 1.0], sizes=(1,))
    request = Request(global_batch=8, microbatch=1, stages=1)
    four, five = (explore(profile, made_cluster({"x": count}), request).best for count in (4, 5))
    assert five.throughput >= four.throughput * (1 - 1e-9)
    assert len(five.candidate.stages[0].accelerators) == 4
