"""Plans near a given one: cuts moved, accelerators swapped, replicas moved, stages joined and divided."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from bapipe.costs.segments import Chain
from bapipe.hardware.cluster import Cluster
from bapipe.planner.candidate import StageChoice

__all__ = ["moved_cuts", "other_shapes", "swapped_orders"]

Floats = NDArray[np.float64]
Cuts = tuple[int, ...]
Order = tuple[int, ...]


def moved_cuts(cuts: Cuts, *, most: int) -> list[Cuts]:
    """The last units of all stages, and the same with one cut or several neighbouring ones moved.

    By one unit and by more, as far as stages keep a unit each; at most so many.
    """
    found = {cuts: None}
    widest = max(1, (cuts[-1] + 1) // (2 * len(cuts)))
    steps = [step for step in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if step <= widest]
    for step in steps:
        for first, last in itertools.combinations_with_replacement(range(len(cuts) - 1), 2):
            before, moved, after = cuts[:first], cuts[first : last + 1], cuts[last + 1 :]
            for by in (-step, step):
                if (before[-1] if before else -1) < moved[0] + by and moved[-1] + by < after[0]:
                    found[(*before, *(cut + by for cut in moved), *after)] = None
        if len(found) > most:
            break
    return list(found)[:most]


def swapped_orders(cluster: Cluster, order: Order, *, most: int) -> list[Order]:
    """The accelerators of the ranks, and the same with two of them swapped, or one for another that is idle.

    Only of other types, nodes or groups: the others are alike. Also all of them in turn from their nodes, so that
    replicas are apart, and node by node, so that they are together. Along a chain they stay.
    """
    found = {order: None}
    if cluster.topology == "chain":
        return [order]
    for placed in _placed_anew(cluster, order):
        found[placed] = None

    def differ(one: int, other: int) -> bool:
        first, second = cluster.accelerators[one], cluster.accelerators[other]
        apart = cluster.between is not None and first.node != second.node
        return first.type != second.type or apart or first.groups != second.groups or bool(cluster.pairs)

    for one, other in itertools.combinations(range(len(order)), 2):
        if differ(order[one], order[other]):
            trial = list(order)
            trial[one], trial[other] = order[other], order[one]
            found[tuple(trial)] = None
    idle = [index for index in range(len(cluster)) if index not in order]
    for place, index in itertools.product(range(len(order)), idle):
        if differ(order[place], index):
            found[(*order[:place], index, *order[place + 1 :])] = None
    return list(found)[:most]


def _placed_anew(cluster: Cluster, order: Order) -> Iterator[Order]:
    """The same accelerators group by group, and dealt from the groups in turn; each rank keeps its type."""
    depth = len(cluster.place(0)) if cluster.tells_places else 0
    for level in range(depth):
        groups: dict[object, list[int]] = {}
        for index in sorted(order):
            groups.setdefault(cluster.place(index)[: level + 1], []).append(index)
        if len(groups) < 2:
            continue
        rows = itertools.zip_longest(*groups.values())
        together = [index for own in groups.values() for index in own]
        for listed in (together, [index for row in rows for index in row if index is not None]):
            yield _of_types(cluster, order, listed)


def _of_types(cluster: Cluster, order: Order, listed: list[int]) -> Order:
    """The listed accelerators, each type's in turn, at the ranks of `order` that have its type."""
    queues: dict[str, list[int]] = {}
    for index in reversed(listed):
        queues.setdefault(cluster.accelerators[index].type, []).append(index)
    return tuple(queues[cluster.accelerators[index].type].pop() for index in order)


def other_shapes(
    chain: Chain, cluster: Cluster, stages: Sequence[StageChoice], *, replicas: bool
) -> Iterator[tuple[tuple[int, ...], Cuts, Order]]:
    """Replica counts, cuts and accelerators of plans with one stage more or less, or a replica elsewhere.

    Cuts are those that stay, and those at which every replica would have as much to do.
    """
    members = [list(stage.accelerators) for stage in stages]
    cuts = tuple(stage.last for stage in stages)
    used = {index for own in members for index in own}
    idle = [index for index in range(len(cluster)) if index not in used]
    work = chain.work.mean(axis=0)
    seen: set[tuple[tuple[int, ...], Cuts, Order]] = set()
    for groups, kept in _regrouped(members, cuts, idle, work, replicas=replicas):
        counts = tuple(len(own) for own in groups)
        order = tuple(index for own in groups for index in own)
        for trial in dict.fromkeys((kept, _balanced(work, counts))):
            if trial is not None and len(trial) == len(counts) and (counts, trial, order) not in seen:
                seen.add((counts, trial, order))
                yield counts, trial, order


def _regrouped(
    members: list[list[int]], cuts: Cuts, idle: list[int], work: Floats, *, replicas: bool
) -> Iterator[tuple[list[list[int]], Cuts | None]]:
    """Accelerators of each stage, and the cuts where they stay."""
    count = len(members)
    for stage in range(count):  # one stage takes in the next, with all accelerators or the first one's
        if stage + 1 < count:
            rest = (*cuts[:stage], *cuts[stage + 1 :])
            for own in ([*members[stage], *members[stage + 1]], members[stage], members[stage + 1]):
                if replicas or len(own) == 1:
                    yield [*members[:stage], own, *members[stage + 2 :]], rest
        first = cuts[stage - 1] + 1 if stage else 0
        middle = _middle(work, first, cuts[stage])
        if middle is None:
            continue
        divided = (*cuts[:stage], middle, *cuts[stage:])
        for at in range(1, len(members[stage])):
            yield [*members[:stage], members[stage][:at], members[stage][at:], *members[stage + 1 :]], divided
        if idle:
            yield [*members[: stage + 1], [idle[0]], *members[stage + 1 :]], divided
    if not replicas:
        return
    for target in range(count):
        if idle:
            yield [[*own, idle[0]] if place == target else own for place, own in enumerate(members)], cuts
        for source in range(count):
            if source != target and len(members[source]) > 1:
                taken = members[source][-1]
                yield (
                    [
                        [*own, taken] if place == target else own[:-1] if place == source else own
                        for place, own in enumerate(members)
                    ],
                    cuts,
                )


def _middle(work: Floats, first: int, last: int) -> int | None:
    """The last unit of the first of two parts of a run that have about as much to do; None: it has one unit."""
    if first == last:
        return None
    done = np.cumsum(work[first : last + 1])
    return min(last - 1, first + int(np.searchsorted(done, done[-1] / 2)))


def _balanced(work: Floats, counts: tuple[int, ...]) -> Cuts | None:
    """Cuts at which every replica has about as much to do; None where a stage would have none."""
    done = np.cumsum(work)
    wanted = np.cumsum(counts)[:-1] / sum(counts) * done[-1]
    cuts = (*np.searchsorted(done, wanted).tolist(), len(work) - 1)
    return cuts if all(before < after for before, after in itertools.pairwise((-1, *cuts))) else None
