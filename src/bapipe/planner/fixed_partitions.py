"""Partitions that do not depend on the schedule (the baselines'), and the paper's, which depends on its memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from bapipe.costs.segments import Chain
from bapipe.costs.stage_memory import UnitBytes, stage_bytes
from bapipe.costs.stage_time import UnitSeconds
from bapipe.hardware.cluster import Cluster, Link
from bapipe.planner.candidate import Candidate, Hardware, StageChoice
from bapipe.planner.partition import baselines
from bapipe.planner.partition.paper.balanced import Balanced, balanced_partition
from bapipe.planner.partition.paper.stage_cuts import Cuts
from bapipe.planner.pipelines import Family, build, require_layers, unreplicated_stages
from bapipe.planner.request import Request
from bapipe.planner.tuning import DEFAULT_TUNING, Tuning

__all__ = ["dealt_stages", "fixed_partitions", "paper_candidate"]


def _depth(chain: Chain, hardware: Hardware, request: Request) -> int:
    depth = request.stages or len(hardware.cluster)
    if request.stages is None and request.space == "full":
        depth = min(depth, len(chain))
    require_layers(chain, depth)
    return depth


def _slowest(cluster: Cluster) -> Link:
    """The slowest link between neighbours."""
    return min(cluster.stage_links, key=lambda item: item.bandwidth)


def _transfer_of(link: Link) -> Callable[[Chain], Callable[[int], float]]:
    """chain -> (cut -> seconds the link is busy per micro-batch)."""

    def of(chain: Chain) -> Callable[[int], float]:
        def seconds(cut: int) -> float:
            sizes = (float(chain.boundary_forward[cut]), float(chain.boundary_backward[cut]))
            return (sum(sizes) if link.duplex == "half" else max(sizes)) / link.bandwidth + link.latency

        return seconds

    return of


def fixed_partitions(
    chain: Chain, hardware: Hardware, request: Request, tuning: Tuning = DEFAULT_TUNING
) -> list[tuple[StageChoice, ...]]:
    """The baselines' stages: the asked one's, or, for the exact strategy, all of them as candidates of its own."""
    cluster = hardware.cluster
    depth = _depth(chain, hardware, request)
    row = chain.row(cluster.accelerators[0].type)
    makers: dict[str, Callable[[], Sequence[int]]] = {
        "uniform": lambda: baselines.uniform(len(chain), depth),
        "parameters": lambda: _by_parameter_spread(tuple(UnitBytes.of(chain).weights.tolist()), depth),
        "time": lambda: baselines.by_time(UnitSeconds.of(chain).work[row].tolist(), depth),
    }
    thorough = request.strategy == "exact" and len(chain) * len(cluster) <= tuning.thorough_size
    wanted = list(makers) if thorough else [name for name in makers if name == request.strategy]
    found: dict[tuple[StageChoice, ...], None] = {}
    for name in wanted:
        found[dealt_stages(makers[name](), [1] * depth, len(chain))] = None
    small = len(chain) <= tuning.pipedream_layers and len(cluster) <= tuning.pipedream_accelerators
    if request.strategy == "pipedream" or (request.strategy == "exact" and small and cluster.topology == "full"):
        for stages in _pipedream(chain, hardware, request, depth):
            found[stages] = None
    return list(found)


@functools.lru_cache(maxsize=8)
def _by_parameter_spread(weights: tuple[float, ...], depth: int) -> Cuts:
    """The same for every micro-batch size, and O(layers² · depth)."""
    return baselines.by_parameter_spread(weights, depth)


def dealt_stages(firsts: Sequence[int], replicas: Sequence[int], units: int) -> tuple[StageChoice, ...]:
    """Stages from the first layer of every stage but the first; an empty stage's accelerators stay idle."""
    edges = [0, *firsts, units]
    stages, at = [], 0
    for first, end, count in zip(edges[:-1], edges[1:], replicas, strict=True):
        if end > first:
            members = tuple(range(at, at + count))
            stages.append(StageChoice(first=first, last=end - 1, accelerators=members))
            at += count
    return tuple(stages)


def _pipedream(chain: Chain, hardware: Hardware, request: Request, depth: int) -> list[tuple[StageChoice, ...]]:
    """PipeDream's own optimum: without replicas, and with replicated stages where the space allows them."""
    cluster = hardware.cluster
    row = chain.row(cluster.accelerators[0].type)
    free = request.stages is None and request.space == "full" and len(cluster) > 1
    found = []
    for machines, unreplicated in [(depth, True), *([(len(cluster), False)] if free else [])]:
        plan = baselines.pipedream(
            UnitSeconds.of(chain).work[row].tolist(),
            transfer=(chain.boundary_forward[:-1] / cluster.within.bandwidth).tolist(),
            synchronise=(UnitBytes.of(chain).weights / cluster.within.bandwidth).tolist(),
            machines=machines,
            unreplicated=unreplicated,
        )
        found.append(dealt_stages(plan.cuts, plan.replicas, len(chain)))
    return found


def paper_candidate(
    chain: Chain,
    hardware: Hardware,
    family: Family,
    microbatches: int,
    request: Request,
    tuning: Tuning = DEFAULT_TUNING,
    *,
    fitting: bool = False,
) -> Candidate | None:
    """The paper's balanced partition for a family of schedules, on the accelerators in the cluster's order.

    None where all is recomputed, and with `fitting` where no cuts would fit.
    """
    if family.recompute == "always":
        return None
    cluster = hardware.cluster
    depth = _depth(chain, hardware, request)
    members, copies = range(depth), hardware.static_copies()
    capacity = tuple(cluster.type_of(index).memory for index in members)
    inflight = tuple(family.inflight(depth - index, depth, microbatches) for index in members)
    if fitting and not _may_fit(chain, capacity, inflight, copies):
        return None
    balanced = _balanced(
        chain,
        rows=tuple(chain.row(cluster.accelerators[index].type) for index in members),
        capacity=capacity,
        inflight=inflight,
        copies=copies,
        link=_slowest(cluster),
        split_layers=request.strategy == "bapipe" or request.split_layers,
        slices=tuning.slices,
    )
    stages = unreplicated_stages(balanced.cuts, members)
    return replace(build(balanced.chain, stages, family, microbatches, hardware, tuning), steps=balanced.steps)


def _may_fit(chain: Chain, capacity: Sequence[float], inflight: Sequence[int], copies: float) -> bool:
    """Whether stages hold all units, were there no messages and workspaces: each in turn takes what it can."""
    static = np.concatenate([[0.0], np.cumsum(UnitBytes.of(chain).always(copies))])
    saved = np.concatenate([[0.0], np.cumsum(chain.saved_activations)])
    held = 0
    for room, count in zip(capacity, inflight, strict=True):
        needed = static + count * saved
        held = int(np.searchsorted(needed, needed[held] + room * (1 + 1e-9), side="right")) - 1
    return held == len(chain)


@functools.lru_cache(maxsize=8)
def _balanced(
    chain: Chain,
    *,
    rows: tuple[int, ...],
    capacity: tuple[float, ...],
    inflight: tuple[int, ...],
    copies: float,
    link: Link,
    split_layers: bool,
    slices: int,
) -> Balanced:
    """The partition, which families with as many in-flight micro-batches share."""

    def memory_of(own: Chain) -> Callable[[Cuts], list[float]]:
        known: dict[tuple[int, int, int], float] = {}

        def needs(cuts: Cuts) -> list[float]:
            needed, first = [], 0
            for index, last in enumerate(cuts):
                # Cuts move one at a time, so all stages but two are known.
                key = (index, first, last)
                held = known.get(key)
                if held is None:
                    held = known[key] = stage_bytes(own, first, last).held(copies, inflight[index])
                needed.append(held)
                first = last + 1
            return needed

        return needs

    return balanced_partition(
        chain,
        rows,
        transfer_of=_transfer_of(link),
        memory_of=memory_of,
        capacity=capacity,
        split_layers=split_layers,
        slices=slices,
    )
