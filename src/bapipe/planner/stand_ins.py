"""Few copies of a pipeline that stand for all: what is simulated of a plan for hundreds of accelerators.

Copies share nothing but the all-reduce, unless a bus or an uplink joins them, and those whose links are alike take
the same times. So one of each kind of copy is simulated, two at least, with the all-reduce that all copies take.
What all copies send over an uplink those that are simulated send: each transfer takes as long there as one of each
copy that shares it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from bapipe.hardware.cluster import Cluster
from bapipe.schedule.actions import Schedule
from bapipe.schedule.replicas import replicated_pipelines

__all__ = ["stand_ins"]


def stand_ins(
    schedule: Schedule, ranks: Sequence[int], copies: int, cluster: Cluster
) -> tuple[Schedule, tuple[int, ...], Mapping[object, float]]:
    """The schedule of few copies that take as long as all, the accelerator of each of its ranks, and crowding.

    `schedule` is that of one copy, `ranks` has the accelerators of all: rank i of copy k is entry i · copies + k.
    Crowding has, of each uplink that they cross, how many transfers of all copies one of theirs stands for. Linear
    in the accelerators.
    """
    own = [tuple(ranks[copy::copies]) for copy in range(copies)]
    kinds: dict[tuple[object, ...], int] = {}
    pairs = _pairs(schedule)
    for copy, accelerators in enumerate(own):
        kinds.setdefault(_links(pairs, accelerators, cluster), copy)
    chosen = sorted(kinds.values())
    if len(chosen) == 1:
        chosen.append(next(copy for copy in range(copies) if copy != chosen[0]))
    if cluster.bus_bandwidth is not None:
        chosen = _on_their_nodes(chosen, own, cluster)
    together = replicated_pipelines([schedule] * len(chosen))
    crowding = _crowding(pairs, own, chosen, cluster)
    return together, tuple(own[copy][rank] for rank in range(schedule.num_ranks) for copy in chosen), crowding


def _crowding(
    pairs: Sequence[tuple[int, int]], own: Sequence[Sequence[int]], chosen: Sequence[int], cluster: Cluster
) -> dict[object, float]:
    """Transfers over the busiest uplink of each level, for one of the chosen copies over each uplink."""
    if not any(level.uplink is not None for level in cluster.levels):
        return {}

    def crossing(copies: Iterable[int]) -> Counter[tuple[object, ...]]:
        ends = ((own[copy][source], own[copy][target]) for copy in copies for source, target in pairs)
        return Counter(key for pair in ends for way in (pair, pair[::-1]) for key, _ in cluster.uplinks(*way))

    busiest: dict[object, int] = {}
    for (_, level, _, _), count in crossing(range(len(own))).items():
        busiest[level] = max(count, busiest.get(level, 0))
    return {key: busiest[key[1]] / count for key, count in crossing(chosen).items()}


def _pairs(schedule: Schedule) -> list[tuple[int, int]]:
    """The ranks of neighbouring stages that talk to each other."""
    met = (pair for boundary in range(schedule.num_stages - 1) for pair in schedule.meetings(boundary))
    return list(dict.fromkeys(met))


def _links(pairs: Sequence[tuple[int, int]], accelerators: Sequence[int], cluster: Cluster) -> tuple[object, ...]:
    """What tells the times of two copies apart: the links between their stages."""
    found: list[object] = []
    for source, target in pairs:
        one, other = accelerators[source], accelerators[target]
        same_node = cluster.accelerators[one].node == cluster.accelerators[other].node
        found += [cluster.link(one, other), same_node]
    return tuple(found)


def _on_their_nodes(chosen: Sequence[int], own: Sequence[tuple[int, ...]], cluster: Cluster) -> list[int]:
    """These copies and those that share a bus with them, directly or through others."""
    places = [{cluster.accelerators[index].node for index in accelerators} for accelerators in own]
    nodes = set().union(*(places[copy] for copy in chosen))
    while True:
        found = [copy for copy, place in enumerate(places) if place & nodes]
        reached = nodes.union(*(places[copy] for copy in found))
        if reached == nodes:
            return found
        nodes = reached
