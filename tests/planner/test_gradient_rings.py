"""The all-reduce of replicas by where they are: one ring, or rings within nodes and between them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import Accelerator, Cluster, CollectiveRates, Level, Link, Uplink
from bapipe.hardware.cluster_merge import merged_clusters
from bapipe.planner.gradient_rings import (
    all_gather,
    all_reduce,
    all_reduce_time,
    gradient_sum,
    gradient_sum_time,
    reduce_scatter,
    shared_uplinks,
)
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


def levelled(racks: int, nodes: int, each: int, *, uplink: float, rack_uplink: float | None = None) -> Cluster:
    """Racks of nodes; every node has an uplink, every rack a link of 20 between its nodes."""
    rack = Level(
        name="rack",
        link=Link(bandwidth=20.0, latency=0.05),
        uplink=None if rack_uplink is None else Uplink(bandwidth=rack_uplink),
    )
    host = Level(name="host", over="accelerators", uplink=Uplink(bandwidth=uplink))
    flat = cluster(racks * nodes, each)
    placed = tuple(
        replace(item, groups=(item.node, f"rack{index // (nodes * each)}"))
        for index, item in enumerate(flat.accelerators)
    )
    return replace(flat, accelerators=placed, levels=(host, rack), between=BETWEEN)


def test_edges_of_a_ring_share_the_uplinks_that_they_cross() -> None:
    """A ring goes from node to node, so that each uplink has one edge; dealt members make no other ring."""
    own = levelled(1, 2, 2, uplink=5.0)
    for members in ((0, 1, 2, 3), (0, 2, 1, 3)):
        slowest = Link(bandwidth=5.0, latency=0.05)
        assert all_reduce_time(own, members, SIZE) == pytest.approx(ring(4, slowest))
    beside = shared_uplinks(own, [(0, 2), (1, 3)])
    assert set(beside.values()) == {2}
    halved = Link(bandwidth=2.5, latency=0.05)
    assert all_reduce_time(own, (0, 2), SIZE, beside=beside) == pytest.approx(ring(2, halved))
    assert shared_uplinks(own, [(0, 1), (2, 3)]) == {}


def test_every_level_has_its_ring() -> None:
    """Members take part with their own links: four of 20 in a node, within an uplink of 60."""
    own = levelled(2, 4, 4, uplink=60.0, rack_uplink=30.0)
    members = tuple(range(32))
    within, node = ring(4, WITHIN), ring(4, Link(bandwidth=60.0, latency=0.05))
    rack = ring(2, Link(bandwidth=30.0, latency=0.1))
    assert all_reduce_time(own, members, SIZE) == pytest.approx(within + node + rack)
    flat = ring(32, Link(bandwidth=10.0, latency=0.1))
    assert all_reduce_time(own, members, SIZE) < flat
    assert all_reduce_time(own, members[:-1], SIZE) == pytest.approx(ring(31, BETWEEN))


PAIR = (0, 1)
RATES = CollectiveRates(buckets=20.0, gather=40.0, scatter=30.0)


def sends(rate: float) -> float:
    """What a rank sends at that rate when two gather or scatter, and the latency of it."""
    return SIZE / 2 / rate + WITHIN.latency


@pytest.mark.parametrize("kind", ["gpu", "cpu"])
def test_collectives_take_what_their_own_rates_say(kind: str) -> None:
    """And one all-reduce alone what the cluster says of that."""
    own = replace(cluster(1, 2), collective_bandwidth=10.0, collective_rates=RATES)
    own = replace(own, types={"x": replace(own.types["x"], kind=kind)})
    assert all_reduce_time(own, PAIR, SIZE) == pytest.approx(2 * sends(10.0))
    assert gradient_sum_time(own, PAIR, SIZE) == pytest.approx(2 * sends(20.0))
    assert all_gather(own, PAIR).seconds(SIZE) == pytest.approx(sends(40.0))
    assert reduce_scatter(own, PAIR).seconds(SIZE) == pytest.approx(sends(30.0))
    late, each = gradient_sum(own, PAIR).line()
    assert late + SIZE * each == pytest.approx(gradient_sum_time(own, PAIR, SIZE))


def test_collectives_without_rates_of_their_own_are_parts_of_an_all_reduce() -> None:
    """gloo, by which CPUs scatter, makes a whole one of it."""
    own = replace(cluster(1, 2), collective_bandwidth=10.0)
    whole = all_reduce_time(own, PAIR, SIZE)
    assert gradient_sum(own, PAIR) is all_reduce(own, PAIR)  # made once for both
    assert gradient_sum_time(own, PAIR, SIZE) == whole
    assert all_gather(own, PAIR).seconds(SIZE) == reduce_scatter(own, PAIR).seconds(SIZE) == whole / 2
    cpus = replace(own, types={"x": replace(own.types["x"], kind="cpu")})
    assert all_gather(cpus, PAIR).seconds(SIZE) == whole / 2
    assert reduce_scatter(cpus, PAIR).seconds(SIZE) == whole


def test_nothing_is_sent_where_there_is_nothing() -> None:
    own = replace(cluster(1, 2), collective_bandwidth=10.0, collective_rates=RATES)
    for found in (gradient_sum(own, PAIR), all_gather(own, PAIR), reduce_scatter(own, PAIR)):
        assert found.seconds(0.0) > 0.0
        assert found.seconds_if_any(0.0) == 0.0
    assert all_gather(own, (0,)).seconds(SIZE) == 0.0


def test_rates_of_collectives_need_that_of_an_all_reduce() -> None:
    with pytest.raises(BaPipeError, match="without that of an all-reduce; add its bandwidth"):
        replace(cluster(1, 2), collective_rates=RATES)
    with pytest.raises(BaPipeError, match="gather must be more than 0, got 0; correct it"):
        CollectiveRates(gather=0.0)


def test_the_slowest_node_s_collectives_stand_for_all() -> None:
    """At most at the rate of the link between nodes."""
    first = replace(cluster(1, 2), collective_bandwidth=10.0, collective_rates=RATES)
    second = replace(first, collective_rates=CollectiveRates(buckets=15.0, gather=90.0))
    merged = merged_clusters({"a": first, "b": second}, between=Link(bandwidth=35.0), name="both")
    assert merged.collective_rates == CollectiveRates(buckets=15.0, gather=35.0, scatter=30.0)
