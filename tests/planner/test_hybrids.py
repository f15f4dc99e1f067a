"""Pipelines of replicated stages: found where they are fastest."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapipe.costs.segments import make_chain
from bapipe.hardware.cluster import Link
from bapipe.planner import Request, explore
from bapipe.planner.candidate import Hardware, StageChoice
from bapipe.planner.evaluate import evaluate
from bapipe.planner.hybrids import balanced_hybrids
from bapipe.planner.pipelines import FAMILIES, build
from bapipe.planner.tuning import DEFAULT_TUNING
from bapipe.schedule.v_shape import V_SHAPED
from example_counts import examples
from made_profiles import made_cluster, made_profile

VGG = [5.7, 33.7, 12.3, 26.5, 11.3, 19.3, 20.7, 11.9, 14.2, 15.0, 7.3, 7.4, 8.0, 3.5, 0.6, 0.3]
"""milliseconds of VGG-16's layers: the first ones are slow, the last ones have nearly all the weights"""
WEIGHTS = [0.0, 0.1, 0.3, 0.6, 1.2, 2.4, 2.4, 4.7, 9.4, 9.4, 9.4, 9.4, 9.4, 411.0, 67.0, 16.0]


def test_what_has_the_time_is_replicated_and_what_has_the_weights_is_not() -> None:
    """As PipeDream has it for VGG-16: data parallelism sums all weights, a pipeline without replicas is uneven."""
    profile = made_profile({"x": VGG}, weights=WEIGHTS, boundary=[0.01] * len(VGG), sizes=(1,))
    cluster = made_cluster({"x": 4}, bandwidth=2.0)
    found = explore(profile, cluster, Request(global_batch=32))
    others = [item for item in found.considered if item.candidate.schedule.name not in (*V_SHAPED, "interleaved")]
    best = min(others, key=lambda item: item.time)
    stages = best.candidate.stages
    assert [len(stage.accelerators) for stage in stages] == [3, 1]
    assert stages[1].last - stages[1].first >= 3
    plain = [item for item in found.considered if len({len(s.accelerators) for s in item.candidate.stages}) == 1]
    whole = [item for item in plain if item.candidate.schedule.name == "data-parallel"]
    unreplicated = [item for item in plain if len(item.candidate.stages) == 4]
    assert best.time < 0.97 * min(item.time for item in (*whole, *unreplicated))
    assert whole
    assert unreplicated


@settings(max_examples=examples(30), deadline=None)
@given(
    work=st.lists(st.integers(1, 9).map(float), min_size=6, max_size=9),
    count=st.integers(3, 5),
    weight=st.sampled_from([0.0, 20.0]),
)
def test_the_search_is_close_to_every_hybrid_of_two_stages(work: list[float], count: int, weight: float) -> None:
    profile = made_profile(
        {"x": work}, weights=[0.0] * (len(work) - 1) + [weight], boundary=[0.01] * len(work), sizes=(1,)
    )
    cluster = made_cluster({"x": count}, bandwidth=1.0)
    chain, hardware = make_chain(profile, ("x",), 1), Hardware(cluster=cluster)
    times = []
    for cut, first in itertools.product(range(len(work) - 1), range(1, count)):
        stages = (
            StageChoice(first=0, last=cut, accelerators=tuple(range(first))),
            StageChoice(first=cut + 1, last=len(work) - 1, accelerators=tuple(range(first, count))),
        )
        times.append(evaluate(build(chain, stages, FAMILIES["1f1b-so"], 24, hardware), hardware).time)
    assert explore(profile, cluster, Request(global_batch=24)).best.time <= min(times) * 1.02


@pytest.mark.parametrize("count", [2, 3, 8, 40])
def test_all_accelerators_are_dealt_once(count: int) -> None:
    profile = made_profile({"x": VGG}, weights=WEIGHTS, sizes=(1,))
    chain = make_chain(profile, ("x",), 1)
    found = [stages for _, stages in balanced_hybrids(chain, Hardware(cluster=made_cluster({"x": count})), 64)]
    assert len(set(found)) == len(found)
    assert bool(found) == (count > 2)
    for stages in found:
        assert [index for stage in stages for index in stage.accelerators] == list(range(count))
        assert max(len(stage.accelerators) for stage in stages) > 1
        assert [stage.first for stage in stages[1:]] == [stage.last + 1 for stage in stages[:-1]]
        assert (stages[0].first, stages[-1].last) == (0, len(VGG) - 1)


def test_whole_pipelines_are_replicated() -> None:
    """Eight stages of these layers are uneven, four or two are not."""
    profile = made_profile({"x": [1.0, 3.0] * 4}, weights=[1.0] * 8, boundary=[0.01] * 8, sizes=(1,))
    cluster = made_cluster({"x": 8}, bandwidth=5.0)
    found = explore(profile, cluster, Request(global_batch=16, schedule="zb-h1"))
    stages = found.best.candidate.stages
    assert [len(stage.accelerators) for stage in stages] in ([2] * 4, [4] * 2)
    assert found.best.candidate.label.startswith("zb-h1, stages ")
    unreplicated = explore(profile, cluster, Request(global_batch=16, schedule="zb-h1", stages=8)).best
    assert found.best.time < 0.9 * unreplicated.time
    assert sorted(index for stage in stages for index in stage.accelerators) == list(range(8))


def test_each_of_them_keeps_to_a_node_where_links_between_nodes_are_slow() -> None:
    profile = made_profile({"x": [1.0] * 4}, boundary=[1.0] * 4, sizes=(1,))
    cluster = made_cluster({"x": 4}, bandwidth=100.0)
    nodes = tuple(replace(item, node=f"node{index // 2}") for index, item in enumerate(cluster.accelerators))
    slow = replace(cluster, accelerators=nodes, between=Link(bandwidth=0.1))
    best = explore(profile, slow, Request(global_batch=16, schedule="zb-h1")).best
    assert [stage.accelerators for stage in best.candidate.stages] == [(0, 2), (1, 3)]


@pytest.mark.parametrize("count", [5, 8, 24])
@pytest.mark.parametrize("weights", [WEIGHTS, WEIGHTS[::-1], [1.0] * len(VGG)])
def test_those_that_a_bound_leaves_out_are_slower(count: int, weights: list[float]) -> None:
    profile = made_profile({"x": VGG}, weights=weights, sizes=(1,))
    chain, hardware = make_chain(profile, ("x",), 1), Hardware(cluster=made_cluster({"x": count}, bandwidth=2.0))
    every = balanced_hybrids(chain, hardware, 64, replace(DEFAULT_TUNING, hybrids_simulated=10_000))
    found = balanced_hybrids(chain, hardware, 64)
    assert len(found) < len(every)
    assert found == every[: len(found)]
    assert every == sorted(every, key=lambda own: own[0])
