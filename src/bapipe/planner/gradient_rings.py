"""What collectives take: sums, gathers and scatters, by one ring or by rings within groups and between.

The one place that says it. A ring's all-gather and reduce-scatter each take half of its all-reduce. Where a
cluster has a measured rate of one of them, or of sums in buckets, that one counts in place of the all-reduce's.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bapipe.hardware.cluster import Cluster, Link

__all__ = [
    "Collective",
    "all_gather",
    "all_reduce",
    "all_reduce_time",
    "gradient_sum",
    "gradient_sum_time",
    "on_gpus",
    "reduce_scatter",
    "shared_uplinks",
]

_FEW_NODES = 2
"""nodes up to which a group is one ring"""
_MANY_BYTES = 1e12
"""so many that a sum's latency is lost in its time, from which the time of one byte is taken"""
_ALONE: Mapping[object, int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ring:
    """So many accelerators, or groups of them, that each send to the next."""

    count: int
    bandwidth: float
    latency: float

    def seconds(self, size: float) -> float:
        steps = 2 * (self.count - 1)
        return steps / self.count * size / self.bandwidth + steps * self.latency


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """A sum, a gather or a scatter among some accelerators, of however many bytes."""

    ways: tuple[tuple[_Ring, ...], ...]
    """rings one after another, of which the fastest way is taken; none where there is nothing to send"""
    part: float = 1.0
    """of the rings' time, which is that of an all-reduce"""

    def seconds(self, size: float) -> float:
        """Of so many bytes."""
        found = math.inf if self.ways else 0.0
        for rings in self.ways:
            whole = 0.0
            for ring in rings:
                whole += ring.seconds(size)
            found = min(found, whole)
        return self.part * found

    def seconds_if_any(self, size: float) -> float:
        """The same, but where there are no bytes nothing is sent."""
        return self.seconds(size) if size > 0 else 0.0

    def line(self) -> tuple[float, float]:
        """Seconds that it takes of any bytes, and what each byte adds."""
        late = self.seconds(0.0)
        return late, (self.seconds(_MANY_BYTES) - late) / _MANY_BYTES


def all_reduce_time(
    cluster: Cluster, members: tuple[int, ...], size: float, *, beside: Mapping[object, int] = _ALONE
) -> float:
    """Seconds of one all-reduce of `size` bytes, as `all_reduce` has it."""
    return all_reduce(cluster, members, beside=beside).seconds(size)


def all_reduce(
    cluster: Cluster,
    members: tuple[int, ...],
    *,
    beside: Mapping[object, int] = _ALONE,
    rate: float | None = None,
) -> Collective:
    """One all-reduce among these accelerators, by index. Linear in their number.

    A ring takes 2(r−1)/r of the bytes over its slowest link, or at the collective's own rate, and 2(r−1) of its
    longest latency. Edges of the ring that cross one uplink share it; by levels the ring goes from group to group.
    GPUs of three nodes or more, several of each, may also reduce in levels, as collective libraries do: a ring in
    every group and one between the groups, which takes a group's share over one link, or where groups have uplinks
    over the links of all its members and the uplink. The faster of both counts. Smaller groups and CPUs, whose
    libraries do not, are one ring. `beside` has uplinks that so many all-reduces cross at once (`shared_uplinks`).
    `rate` is that of the ring where it is known, else the cluster's rate of an all-reduce, if it has one.
    """
    if len(members) < 2:
        return Collective(ways=())
    rate = rate or cluster.collective_bandwidth
    return _among(cluster, members, beside, rate) if beside else _alone(cluster, members, rate)


@functools.lru_cache(maxsize=256)
def _alone(cluster: Cluster, members: tuple[int, ...], rate: float | None) -> Collective:
    """Searches ask for the same ones again and again."""
    return _among(cluster, members, _ALONE, rate)


def _among(
    cluster: Cluster, members: tuple[int, ...], beside: Mapping[object, int], rate: float | None
) -> Collective:
    count = len(members)
    if cluster.levels:
        members = tuple(sorted(members, key=lambda index: (cluster.place(index), index)))
    edges = list(zip(members, (*members[1:], members[0]), strict=True))
    links = {_ring_link(cluster, a, b) for a, b in edges}
    if rate is not None:
        bandwidth = rate
    else:
        bandwidth = min(_one_way(link) for link in links)
        if cluster.bus_bandwidth is not None:
            bandwidth = min(bandwidth, cluster.bus_bandwidth / count)
        if cluster.levels:
            bandwidth = min(bandwidth, _uplink_rate(cluster, edges, beside))
    flat = _Ring(count=count, bandwidth=bandwidth, latency=max(link.latency for link in links))
    levels = _by_levels(cluster, members, beside) if cluster.levels else _two_levels(cluster, members)
    return Collective(ways=((flat,),) if levels is None else ((flat,), levels))


def shared_uplinks(cluster: Cluster, groups: Iterable[Sequence[int]]) -> dict[object, int]:
    """Of all-reduces among these groups of accelerators, how many cross each uplink: as if all were at once."""
    found: Counter[object] = Counter()
    if any(level.uplink is not None for level in cluster.levels):
        for members in groups:
            places = sorted(members, key=lambda index: (cluster.place(index), index))
            edges = zip(places, (*places[1:], places[0]), strict=True) if len(places) > 1 else ()
            found.update({key for ends in edges for key, _ in cluster.uplinks(*ends)})
    return {key: count for key, count in found.items() if count > 1}


def gradient_sum_time(
    cluster: Cluster, members: tuple[int, ...], gradients: float, *, beside: Mapping[object, int] = _ALONE
) -> float:
    """Seconds to sum so many bytes of gradients of replicas; where all is frozen nothing is sent."""
    return gradient_sum(cluster, members, beside=beside).seconds_if_any(gradients)


def gradient_sum(
    cluster: Cluster, members: tuple[int, ...], *, beside: Mapping[object, int] = _ALONE
) -> Collective:
    """The sum of the gradients of replicas, in buckets."""
    return all_reduce(cluster, members, beside=beside, rate=cluster.collective_rates.buckets)


def all_gather(cluster: Cluster, members: tuple[int, ...]) -> Collective:
    """An all-gather, of the bytes that each has afterwards."""
    return replace(all_reduce(cluster, members, rate=cluster.collective_rates.gather), part=0.5)


def reduce_scatter(
    cluster: Cluster, members: tuple[int, ...], *, beside: Mapping[object, int] = _ALONE
) -> Collective:
    """A reduce-scatter, of the bytes that each has before.

    Where its rate is not known it is taken to be as fast as sums, but gloo makes a whole all-reduce of it.
    """
    rate = cluster.collective_rates.scatter
    if rate is not None:
        return replace(all_reduce(cluster, members, beside=beside, rate=rate), part=0.5)
    part = 0.5 if on_gpus(cluster, members) else 1.0
    return replace(gradient_sum(cluster, members, beside=beside), part=part)


def on_gpus(cluster: Cluster, members: Sequence[int]) -> bool:
    """Whether collectives run beside the compute, by NCCL; else they go by gloo and are waited for."""
    return all(cluster.type_of(index).kind == "gpu" for index in members)


def _uplink_rate(cluster: Cluster, edges: Iterable[tuple[int, int]], beside: Mapping[object, int]) -> float:
    """Bytes/s that each edge of a ring has of the uplinks that it crosses with others."""
    crossing: Counter[object] = Counter()
    rates: dict[object, float] = {}
    for ends in edges:
        for key, uplink in cluster.uplinks(*ends):
            crossing[key] += 1
            rates[key] = uplink.bandwidth
    return min((rate / crossing[key] / beside.get(key, 1) for key, rate in rates.items()), default=math.inf)


def _levelled(cluster: Cluster, members: Sequence[int]) -> bool:
    """Whether the group is of the kind that libraries may reduce in levels."""
    if cluster.between is None or cluster.collective_bandwidth is not None:
        return False
    if cluster.pairs or cluster.topology != "full":
        return False
    nodes = {cluster.accelerators[index].node for index in members}
    kinds = {cluster.accelerators[index].type for index in members}
    return len(nodes) > _FEW_NODES and all(cluster.types[name].kind == "gpu" for name in kinds)


def _two_levels(cluster: Cluster, members: tuple[int, ...]) -> tuple[_Ring, ...] | None:
    """Rings within nodes, then between them; None where the group is not of that kind."""
    if not _levelled(cluster, members):
        return None
    between, within = cluster.between, cluster.within
    assert between is not None
    nodes = Counter(cluster.accelerators[index].node for index in members)
    each = min(nodes.values())
    if each < 2 or max(nodes.values()) != each:
        return None
    inside = _one_way(within)
    if cluster.bus_bandwidth is not None:
        inside = min(inside, cluster.bus_bandwidth / each)
    return (
        _Ring(count=each, bandwidth=inside, latency=within.latency),
        _Ring(count=len(nodes), bandwidth=_one_way(between), latency=between.latency),
    )


def _by_levels(
    cluster: Cluster, members: tuple[int, ...], beside: Mapping[object, int]
) -> tuple[_Ring, ...] | None:
    """Rings within the smallest groups, then between them, and so on; None where groups are not alike."""
    if not _levelled(cluster, members):
        return None
    places = [(*cluster.place(index), index) for index in members]
    rings, around = list[_Ring](), 1
    for depth in range(1, len(places[0]) + 1):
        groups = Counter(place[:depth] for place in places)
        parts = Counter(group[:-1] for group in groups)
        count = len(groups) // around
        if set(parts.values()) != {count} or len(set(groups.values())) > 1:
            return None
        around = len(groups)
        if count > 1:
            each = len(members) // around
            rings.append(_between_groups(cluster, members, each, count, beside))
    return tuple(rings)


def _between_groups(
    cluster: Cluster, members: Sequence[int], each: int, count: int, beside: Mapping[object, int]
) -> _Ring:
    """A ring between so many neighbouring groups of `each` members, who all take part with their own links."""
    ends = members[0], members[each]
    link = cluster.link(*ends)
    bandwidth, crossed = _one_way(link), list(cluster.uplinks(*ends))
    if crossed:
        bandwidth *= each
        for key, uplink in crossed:
            slices = members[:each], members[each : 2 * each]
            sharing = max(sum(_crosses(cluster, key, index) for index in own) for own in slices)
            rate = uplink.bandwidth / (2 if uplink.duplex == "half" else 1)
            bandwidth = min(bandwidth, rate * each / sharing / beside.get(key, 1))
    elif cluster.bus_bandwidth is not None and _one_node(cluster, ends):
        bandwidth = min(bandwidth, cluster.bus_bandwidth / (each * count))
    return _Ring(count=count, bandwidth=bandwidth, latency=link.latency)


def _crosses(cluster: Cluster, key: tuple[object, ...], index: int) -> bool:
    """Whether the accelerator is in the group whose uplink that is."""
    _, level, group, _ = key
    place = next(number for number, own in enumerate(cluster.levels) if own.name == level)
    return cluster.accelerators[index].groups[place] == group


def _one_node(cluster: Cluster, ends: tuple[int, int]) -> bool:
    return cluster.accelerators[ends[0]].node == cluster.accelerators[ends[1]].node


def _one_way(link: Link) -> float:
    """Bytes/s of each direction of a ring, which sends and receives at once."""
    return link.bandwidth / (2 if link.duplex == "half" else 1)


def _ring_link(cluster: Cluster, first: int, second: int) -> Link:
    """In a daisy chain the ring closes through all the links between its ends, at the rate of one."""
    return cluster.link(first, second) if cluster.connected(first, second) else cluster.within
