"""One cluster out of those of its nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import Accelerator, AcceleratorType, Cluster, CollectiveRates, Link

__all__ = ["merged_clusters"]


def merged_clusters(nodes: Mapping[str, Cluster], *, between: Link, name: str) -> Cluster:
    """The clusters of single machines as one, each under its node's name, joined by links `between` them.

    Where nodes measured one type, or the links within them, differently, the slower figure stands for all.
    """
    types: dict[str, AcceleratorType] = {}
    accelerators: list[Accelerator] = []
    pairs: dict[str, Link] = {}
    for node, cluster in nodes.items():
        if len(cluster.nodes) != 1:
            raise BaPipeError(
                f"'{node}' describes {len(cluster.nodes)} nodes; give a file of one machine from each host"
            )
        named = {item.name: f"{node}/{index}" for index, item in enumerate(cluster.accelerators)}
        accelerators += [replace(item, name=named[item.name], node=node) for item in cluster.accelerators]
        for key, kind in cluster.types.items():
            if any(item.type == key for item in cluster.accelerators):
                types[key] = kind if key not in types else _slower(types[key], kind)
        for key, link in cluster.pairs.items():
            first, _, second = key.partition(" - ")
            pairs[f"{named[first]} - {named[second]}"] = link
    rates = [
        cluster.collective_bandwidth for cluster in nodes.values() if cluster.collective_bandwidth is not None
    ]
    return Cluster(
        name=name,
        accelerators=tuple(accelerators),
        types=types,
        within=min((cluster.within for cluster in nodes.values()), key=lambda link: link.bandwidth),
        between=between,
        pairs=pairs,
        collective_bandwidth=min([*rates, between.bandwidth]) if rates else None,
        collective_rates=_slowest(nodes.values(), between.bandwidth),
    )


def _slowest(clusters: Iterable[Cluster], between: float) -> CollectiveRates:
    """The least rate of each collective that a node measured, and at most that of the link between nodes."""
    known = [cluster.collective_rates.known for cluster in clusters]
    names = dict.fromkeys(name for own in known for name in own)
    return CollectiveRates(**{name: min(between, *(own[name] for own in known if name in own)) for name in names})


def _slower(one: AcceleratorType, other: AcceleratorType) -> AcceleratorType:
    return replace(
        one,
        flops={key: min(rate, other.flops.get(key, rate)) for key, rate in one.flops.items()},
        memory=min(one.memory, other.memory),
        memory_bandwidth=min(one.memory_bandwidth, other.memory_bandwidth),
    )
