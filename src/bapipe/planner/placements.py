"""Which accelerators stages may have: replicas of each stage, and orders of accelerators that differ."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from bapipe.hardware.cluster import Cluster

__all__ = ["accelerator_orders", "replica_counts"]


def replica_counts(
    accelerators: int, *, stages: int | None, most_stages: int, replicas: bool
) -> Iterator[tuple[int, ...]]:
    """All ways to deal some of so many accelerators to stages: how many each stage gets.

    Exactly `stages` of one accelerator each, where that is given, or one stage of several; else up to
    `most_stages`, with several accelerators each only where `replicas` are allowed. Those that use most
    accelerators come first.
    """
    if stages is not None:
        if stages == 1 and replicas:
            yield from ((count,) for count in range(accelerators, 1, -1))
        yield (1,) * stages
        return
    for used in range(accelerators, 0, -1):
        if not replicas:
            if used <= most_stages:
                yield (1,) * used
            continue
        for depth in range(1, min(used, most_stages) + 1):
            for ends in itertools.combinations(range(1, used), depth - 1):
                yield tuple(high - low for low, high in itertools.pairwise([0, *ends, used]))


def accelerator_orders(cluster: Cluster, used: int, *, most: int) -> list[tuple[int, ...]] | None:
    """One of each set of orders of so many accelerators that differ only in names; None if there are more.

    Accelerators of one type in one node and the same groups are alike, and so are nodes that hold as many of each
    type, and groups of a level, unless some pair has a link of its own. Along a chain, neighbours stay neighbours.
    """
    count = len(cluster)
    if cluster.topology == "chain":
        return [tuple(range(first, first + used)) for first in range(count - used + 1)]
    if cluster.pairs:
        orders = math.perm(count, used)
        return list(itertools.permutations(range(count), used)) if orders <= most else None
    members = _alike(cluster)
    found: dict[tuple[object, ...], tuple[int, ...]] = {}
    for kinds in _arrangements([len(own) for own in members], used):
        if len(found) > most:
            return None
        taken, order = Counter[int](), []
        for kind in kinds:
            order.append(members[kind][taken[kind]])
            taken[kind] += 1
        found.setdefault(_signature(cluster, order), tuple(order))
    return list(found.values())


def _alike(cluster: Cluster) -> list[list[int]]:
    """Accelerators of one type in one node and the same groups, for each of them."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for index, item in enumerate(cluster.accelerators):
        groups.setdefault((*(cluster.place(index) if cluster.tells_places else ()), item.type), []).append(index)
    return list(groups.values())


def _arrangements(counts: Sequence[int], length: int) -> Iterator[list[int]]:
    """All sequences of so many group numbers in which none occurs more often than it may."""
    left, chosen = list(counts), list[int]()

    def grow() -> Iterator[list[int]]:
        if len(chosen) == length:
            yield list(chosen)
            return
        for kind, free in enumerate(left):
            if free:
                left[kind] -= 1
                chosen.append(kind)
                yield from grow()
                chosen.pop()
                left[kind] += 1

    return grow()


def _signature(cluster: Cluster, order: Sequence[int]) -> tuple[object, ...]:
    """What an order is up to the names of nodes and groups."""
    kinds = [cluster.accelerators[index].type for index in order]
    if not cluster.tells_places:
        return tuple(kinds)
    numbers: dict[tuple[str, ...], int] = {}
    found: list[object] = []
    for kind, index in zip(kinds, order, strict=True):
        place = cluster.place(index)
        groups = (place[: level + 1] for level in range(len(place)))
        found.append((kind, *(numbers.setdefault(group, len(numbers)) for group in groups)))
    return tuple(found)
