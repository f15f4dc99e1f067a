"""Equal parts of a cluster, each of which may run a copy of one plan.

A part has as many accelerators of each type as every other. Those of one part are neighbours in the cluster's
order, so that it keeps to few nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bapipe.hardware.cluster import Cluster
from bapipe.planner.candidate import Candidate
from bapipe.planner.hybrids import REPLICATED
from bapipe.planner.state import SearchState

__all__ = ["WORTH_IDLE", "Part", "copies_on", "copies_wanted", "mixed", "parts_of"]

WORTH_IDLE = 0.2
"""share of the accelerators that may be left over for a division to be tried"""


def copies_wanted(state: SearchState) -> bool:
    """Whether the cluster is too large to be searched as a whole, and nothing asked for speaks against copies.

    PP × DP of alike accelerators needs no copies where everything is tried (`replicate_pipelines`); of several
    types it does, and where what is fastest lacks memory: layers that recompute are chosen for a part.
    """
    request = state.request
    free = request.stages is None and request.strategy == "exact" and not state.paper and not request.split_layers
    schedules = (None, "data-parallel", *REPLICATED)
    large = not state.thorough(len(state.profile.layers))
    large = large or (mixed(state.cluster) and len(state.cluster) > state.tuning.whole_mixed)
    large = large or (len(state.cluster) > state.tuning.whole_lacking and state.incumbents.lack_memory)
    return large and free and request.schedule in schedules and state.cluster.topology == "full"


def mixed(cluster: Cluster) -> bool:
    """Whether there are accelerators of several types."""
    return len({item.type for item in cluster.accelerators}) > 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """One of `copies` equal parts."""

    copies: int
    cluster: Cluster
    """the accelerators of the first part, with the links among them"""
    apart: tuple[tuple[int, ...], ...]
    """for each of them its place in the whole cluster in every part, parts next to each other"""
    near: tuple[tuple[int, ...], ...]
    """likewise, where those that do the same in all parts are next to each other instead"""

    def __len__(self) -> int:
        return len(self.cluster)

    def first(self, copies: int) -> Part:
        """The first of these parts alone."""
        return replace(
            self,
            copies=copies,
            apart=tuple(row[:copies] for row in self.apart),
            near=tuple(row[:copies] for row in self.near),
        )


def parts_of(cluster: Cluster, global_batch: int) -> Iterator[Part]:
    """The divisions of the cluster into equal parts that divide the global batch too, the smallest parts first.

    What does not go into equal parts is left over, at most a fifth of the accelerators; of divisions with as many
    accelerators per part the one with most parts. In a daisy chain, where not every part has the links of the
    others, there is one part.
    """
    kinds: dict[str, list[int]] = {}
    for index, item in enumerate(cluster.accelerators):
        kinds.setdefault(item.type, []).append(index)
    seen: set[tuple[int, ...]] = set()
    most = 1 if cluster.topology == "chain" else len(cluster)
    for copies in range(most, 0, -1):
        takes = tuple(len(own) // copies for own in kinds.values())
        used = copies * sum(takes)
        if global_batch % copies or used < (1 - WORTH_IDLE) * len(cluster) or takes in seen:
            continue
        seen.add(takes)
        yield _part(cluster, copies, list(zip(kinds.values(), takes, strict=True)))


def _part(cluster: Cluster, copies: int, shares: list[tuple[list[int], int]]) -> Part:
    rows = []
    for own, take in shares:
        for place in range(take):
            apart = tuple(own[copy * take + place] for copy in range(copies))
            near = tuple(own[place * copies + copy] for copy in range(copies))
            rows.append((apart, near))
    rows.sort()
    first = tuple(cluster.accelerators[apart[0]] for apart, _ in rows)
    return Part(
        copies=copies,
        cluster=cluster.part(first),
        apart=tuple(apart for apart, _ in rows),
        near=tuple(near for _, near in rows),
    )


def copies_on(part: Part, candidate: Candidate, *, near: bool = False) -> Candidate:
    """The candidate for the first part, with a copy on every part.

    Pipelines keep to few nodes, or with `near` the replicas of each stage do.
    """
    places = part.near if near else part.apart
    stages = tuple(
        replace(stage, accelerators=tuple(place for own in stage.accelerators for place in places[own]))
        for stage in candidate.stages
    )
    label = candidate.label if part.copies == 1 else f"{candidate.label}, {part.copies} replicas"
    return replace(candidate, label=label, stages=stages, steps=(), copies=part.copies)
