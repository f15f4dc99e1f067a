"""The all-reduce of replicas by where they are: one ring, or rings within nodes and between them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bapipe.hardware.cluster import Accelerator, Cluster, Link
from bapipe.planner.gradient_rings import all_reduce_time
from made_profiles import made_cluster

SIZE = 1200.0
WITHIN, BETWEEN = Link(bandwidth=100.0, latency=0.01), Link(bandwidth=10.0, latency=0.1)


def cluster(nodes: int, each: int, **more: object) -> Cluster:
    placed = tuple(
        Accelerator(name=f"n{node}/{index}", type="x", node=f"n{node}")
        for node in range(nodes)
        for index in range(each)
    )
    flat = made_cluster({"x": nodes * each}, **more)  # type: ignore[arg-type]
    return replace(flat, accelerators=placed, within=WITHIN, between=BETWEEN if nodes > 1 else None)


def ring(count: int, link: Link) -> float:
    return 2 * (count - 1) / count * SIZE / link.bandwidth + 2 * (count - 1) * link.latency


def test_one_node_is_one_ring() -> None:
    assert all_reduce_time(cluster(1, 8), tuple(range(8)), SIZE) == pytest.approx(ring(8, WITHIN))
    assert all_reduce_time(cluster(1, 8), (3,), SIZE) == 0.0


def test_two_nodes_are_one_ring_at_the_slower_link() -> None:
    assert all_reduce_time(cluster(2, 4), tuple(range(8)), SIZE) == pytest.approx(ring(8, BETWEEN))


def test_many_nodes_sum_within_each_first() -> None:
    own = cluster(16, 8)
    assert all_reduce_time(own, tuple(range(128)), SIZE) == pytest.approx(ring(8, WITHIN) + ring(16, BETWEEN))
    assert all_reduce_time(own, tuple(range(128)), SIZE) < ring(128, BETWEEN)


def test_one_of_each_node_is_a_ring_between_nodes() -> None:
    assert all_reduce_time(cluster(16, 8), tuple(range(0, 128, 8)), SIZE) == pytest.approx(ring(16, BETWEEN))


def test_uneven_groups_and_rates_of_their_own_are_one_ring() -> None:
    own = cluster(4, 4)
    assert all_reduce_time(own, tuple(range(15)), SIZE) == pytest.approx(ring(15, BETWEEN))
    measured = replace(own, collective_bandwidth=25.0)
    rate = Link(bandwidth=25.0, latency=0.1)
    assert all_reduce_time(measured, tuple(range(16)), SIZE) == pytest.approx(ring(16, rate))


def test_cpus_are_one_ring() -> None:
    own = cluster(4, 4)
    cpus = replace(own, types={"x": replace(own.types["x"], kind="cpu")})
    assert all_reduce_time(cpus, tuple(range(16)), SIZE) == pytest.approx(ring(16, BETWEEN))


def test_more_replicas_never_take_less() -> None:
    times = [all_reduce_time(cluster(nodes, 8), tuple(range(8 * nodes)), SIZE) for nodes in range(3, 40)]
    assert times == sorted(times)
