"""Partitions that do not depend on the schedule (the rivals'), and the paper's, which depends on its memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from bapipe.chain import Chain
from bapipe.evaluate import Candidate, Hardware, StageChoice
from bapipe.explore.pipelines import Family, build, require_layers, straight_stages
from bapipe.explore.request import Request
from bapipe.partition import rivals
from bapipe.partition.bapipe import balanced_partition
from bapipe.partition.cuts import Cuts, starts
from bapipe.stage_memory import stage_bytes

__all__ = ["PIPEDREAM_LAYERS", "THOROUGH", "fixed_partitions", "paper_candidate"]

THOROUGH = 5_000
"""layers · accelerators up to which the exact search also tries what the rivals would choose"""
PIPEDREAM_LAYERS = 64
"""layers up to which PipeDream's own dynamic programme is run beside the exact search"""


def _depth(chain: Chain, hardware: Hardware, request: Request) -> int:
    depth = request.stages or len(hardware.cluster)
    if request.stages is None and request.space == "full":
        depth = min(depth, len(chain))
    require_layers(chain, depth)
    return depth


def _transfer_of(hardware: Hardware) -> Callable[[Chain], Callable[[int], float]]:
    """chain -> (cut -> seconds its link is busy per micro-batch), on the slowest link between neighbours."""
    cluster = hardware.cluster
    link = (
        cluster.within
        if cluster.between is None
        else min(cluster.within, cluster.between, key=lambda item: item.bandwidth)
    )

    def of(chain: Chain) -> Callable[[int], float]:
        def seconds(cut: int) -> float:
            sizes = (float(chain.boundary_forward[cut]), float(chain.boundary_backward[cut]))
            return (sum(sizes) if link.duplex == "half" else max(sizes)) / link.bandwidth + link.latency

        return seconds

    return of


def fixed_partitions(chain: Chain, hardware: Hardware, request: Request) -> list[tuple[StageChoice, ...]]:
    """The rivals' stages: the asked one's, or, for the exact strategy, all of them as candidates of its own."""
    cluster = hardware.cluster
    depth = _depth(chain, hardware, request)
    row = chain.row(cluster.accelerators[0].type)
    makers: dict[str, Callable[[], Sequence[int]]] = {
        "uniform": lambda: rivals.uniform(len(chain), depth),
        "parameters": lambda: rivals.by_parameter_spread(chain.weight_bytes.tolist(), depth),
        "time": lambda: rivals.by_time(chain.work[row].tolist(), depth),
    }
    thorough = request.strategy == "exact" and len(chain) * len(cluster) <= THOROUGH
    wanted = list(makers) if thorough else [name for name in makers if name == request.strategy]
    found: dict[tuple[StageChoice, ...], None] = {}
    for name in wanted:
        found[_stages(makers[name](), [1] * depth, len(chain))] = None
    small = len(chain) <= PIPEDREAM_LAYERS and len(cluster) <= 16
    if request.strategy == "pipedream" or (request.strategy == "exact" and small and cluster.topology == "full"):
        for stages in _pipedream(chain, hardware, request, depth):
            found[stages] = None
    return list(found)


def _stages(firsts: Sequence[int], replicas: Sequence[int], units: int) -> tuple[StageChoice, ...]:
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
    """PipeDream's own optimum: straight, and with replicated stages where the space allows them."""
    cluster = hardware.cluster
    row = chain.row(cluster.accelerators[0].type)
    free = request.stages is None and request.space == "full" and len(cluster) > 1
    found = []
    for machines, straight in [(depth, True), *([(len(cluster), False)] if free else [])]:
        plan = rivals.pipedream(
            chain.work[row].tolist(),
            transfer=(chain.boundary_forward[:-1] / cluster.within.bandwidth).tolist(),
            synchronise=(chain.weight_bytes / cluster.within.bandwidth).tolist(),
            machines=machines,
            straight=straight,
        )
        found.append(_stages(plan.cuts, plan.replicas, len(chain)))
    return found


def paper_candidate(
    chain: Chain, hardware: Hardware, family: Family, microbatches: int, request: Request
) -> Candidate | None:
    """The paper's balanced partition for a family of schedules, on the accelerators in the cluster's order."""
    if family.recompute == "always":
        return None
    cluster = hardware.cluster
    depth = _depth(chain, hardware, request)
    members = range(depth)
    rows = [chain.row(cluster.accelerators[index].type) for index in members]
    capacity = [cluster.type_of(index).memory for index in members]

    def memory_of(own: Chain) -> Callable[[Cuts], list[float]]:
        def needs(cuts: Cuts) -> list[float]:
            needed = []
            for index, (first, last) in enumerate(zip(starts(cuts), cuts, strict=True)):
                live = family.inflight(depth - index, depth, microbatches)
                own_bytes = stage_bytes(own, first, last)
                static = own_bytes.weights * hardware.static_copies() + own_bytes.buffers
                needed.append(static + live * own_bytes.stash + own_bytes.workspace)
            return needed

        return needs

    balanced = balanced_partition(
        chain,
        rows,
        transfer_of=_transfer_of(hardware),
        memory_of=memory_of,
        capacity=capacity,
        split_layers=request.strategy == "bapipe" or request.split_layers,
    )
    stages = straight_stages(balanced.cuts, members)
    return replace(build(balanced.chain, stages, family, microbatches, hardware), steps=balanced.steps)
