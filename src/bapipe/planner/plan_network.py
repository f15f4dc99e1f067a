"""The links between the ranks of a candidate or plan, as the simulator takes them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

from bapipe.hardware.cluster import Cluster
from bapipe.schedule.actions import Schedule
from bapipe.simulator.lowering import Network, Route

__all__ = ["network_of"]


def network_of(
    cluster: Cluster,
    ranks: tuple[int, ...],
    schedule: Schedule,
    crowding: Mapping[object, float] | None = None,
) -> Network:
    """The routes between the ranks that talk to each other; amounts are bytes.

    `crowding` has the transfers that one stands for on an uplink (`stand_ins`).
    """
    # Not every replica talks to every other.
    met = (pair for boundary in range(schedule.num_stages - 1) for pair in schedule.meetings(boundary))
    pairs = tuple(dict.fromkeys(met))
    return _between(cluster, ranks, pairs, crowding) if crowding else _uncrowded(cluster, ranks, pairs)


@functools.lru_cache(maxsize=32)
def _uncrowded(cluster: Cluster, ranks: tuple[int, ...], pairs: tuple[tuple[int, int], ...]) -> Network:
    """Many candidates have the same ranks talk to each other."""
    return _between(cluster, ranks, pairs, {})


def _between(
    cluster: Cluster, ranks: tuple[int, ...], pairs: Iterable[tuple[int, int]], crowding: Mapping[object, float]
) -> Network:
    """The routes between these pairs of ranks, both ways."""
    routes = dict[tuple[int, int], Route]()
    for source, target in pairs:
        if source == target or (source, target) in routes:
            continue
        link = cluster.link(ranks[source], ranks[target])
        shared: object = None
        bandwidth = link.bandwidth
        same_node = cluster.accelerators[ranks[source]].node == cluster.accelerators[ranks[target]].node
        if cluster.bus_bandwidth is not None and same_node:
            shared = ("bus", cluster.accelerators[ranks[source]].node)
            bandwidth = min(bandwidth, cluster.bus_bandwidth)
        elif link.duplex == "half":
            shared = ("pair", min(source, target), max(source, target))
        for pair in ((source, target), (target, source)):
            ends = ranks[pair[0]], ranks[pair[1]]
            uplinks = tuple(
                (key, crowding.get(key, 1.0) / uplink.bandwidth) for key, uplink in cluster.uplinks(*ends)
            )
            slowest = max((1 / bandwidth, *(rate for _, rate in uplinks)))
            routes[pair] = Route(seconds_per_unit=slowest, latency=link.latency, link=shared, uplinks=uplinks)
    return Network(routes=routes)
