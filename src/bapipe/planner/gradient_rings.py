"""What it takes to sum the gradients of replicas: one ring, or rings within nodes and between them."""

from __future__ import annotations

from collections import Counter

from bapipe.hardware.cluster import Cluster, Link

__all__ = ["all_reduce_time", "gradient_sum_time"]

_FEW_NODES = 2
"""nodes up to which a group is one ring"""


def all_reduce_time(cluster: Cluster, members: tuple[int, ...], size: float) -> float:
    """Seconds of an all-reduce of `size` bytes among these accelerators, by index. Linear in their number.

    A ring takes 2(r−1)/r of the bytes over its slowest link, or at the collective's own rate, and 2(r−1) of its
    longest latency. GPUs of three nodes or more, several of each, may also reduce in two levels, as collective
    libraries do: a ring in every node and one between the nodes, which takes the node's share over one link. The
    faster of both counts. Smaller groups and CPUs, whose libraries do not, are one ring.
    """
    count = len(members)
    if count < 2:
        return 0.0
    links = {_ring_link(cluster, a, b) for a, b in zip(members, (*members[1:], members[0]), strict=True)}
    if cluster.collective_bandwidth is not None:
        bandwidth = cluster.collective_bandwidth
    else:
        bandwidth = min(_one_way(link) for link in links)
        if cluster.bus_bandwidth is not None:
            bandwidth = min(bandwidth, cluster.bus_bandwidth / count)
    flat = _ring(count, size, bandwidth, max(link.latency for link in links))
    return min(flat, _two_levels(cluster, members, size))


def gradient_sum_time(cluster: Cluster, members: tuple[int, ...], gradients: float) -> float:
    """Seconds to sum so many bytes of gradients of replicas; where all is frozen nothing is sent."""
    return all_reduce_time(cluster, members, gradients) if gradients > 0 else 0.0


def _ring(count: int, size: float, bandwidth: float, latency: float) -> float:
    return 2 * (count - 1) / count * size / bandwidth + 2 * (count - 1) * latency


def _two_levels(cluster: Cluster, members: tuple[int, ...], size: float) -> float:
    """Rings within nodes, then between them; infinite where the group is not of that kind."""
    between, within = cluster.between, cluster.within
    if between is None or cluster.collective_bandwidth is not None or cluster.pairs or cluster.topology != "full":
        return float("inf")
    nodes = Counter(cluster.accelerators[index].node for index in members)
    each = min(nodes.values())
    gpus = all(cluster.types[name].kind == "gpu" for name in {cluster.accelerators[i].type for i in members})
    if len(nodes) <= _FEW_NODES or each < 2 or max(nodes.values()) != each or not gpus:
        return float("inf")
    inside = _one_way(within)
    if cluster.bus_bandwidth is not None:
        inside = min(inside, cluster.bus_bandwidth / each)
    return _ring(each, size, inside, within.latency) + _ring(len(nodes), size, _one_way(between), between.latency)


def _one_way(link: Link) -> float:
    """Bytes/s of each direction of a ring, which sends and receives at once."""
    return link.bandwidth / (2 if link.duplex == "half" else 1)


def _ring_link(cluster: Cluster, first: int, second: int) -> Link:
    """In a daisy chain the ring closes through all the links between its ends, at the rate of one."""
    return cluster.link(first, second) if cluster.connected(first, second) else cluster.within
