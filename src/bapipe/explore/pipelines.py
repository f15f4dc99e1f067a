"""Pipeline candidates: for one micro-batch size and one family of schedules, cut the chain and fit the caps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from bapipe.chain import Chain
from bapipe.cluster import Cluster
from bapipe.errors import BaPipeError, InfeasibleError
from bapipe.evaluate import Candidate, Hardware, StageChoice, all_reduce_time
from bapipe.partition.cuts import starts
from bapipe.partition.exact import solve
from bapipe.partition.exact_problem import Problem
from bapipe.schedule.actions import Schedule
from bapipe.schedule.orders import SCHEDULES, capped, full_overlap_caps, interleaved
from bapipe.stage_memory import stage_bytes

__all__ = [
    "FAMILIES",
    "MOST_TYPES",
    "Family",
    "build",
    "families_for",
    "interleaved_candidate",
    "optimal",
    "require_layers",
    "straight_stages",
]

MOST_TYPES = 3
"""accelerator types that the exact partition orders freely; with more, the cluster's own order is kept"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A schedule as the planner sees it before the stages are known."""

    schedule: str
    live: Literal["behind", "twice", "all", "ranks", "double"]
    """micro-batches live at a stage: one or two for each accelerator from it to the end, all M, or at every stage
    alike N or 2N−1"""
    communication: Literal["overlapped", "exposed"] = "overlapped"
    recompute: Literal["never", "allowed", "always"] = "never"
    replicas: bool = False
    """whether stages may be replicated"""

    def inflight(self, behind: int, ranks: int, microbatches: int) -> int:
        """Micro-batches live at a stage with so many accelerators from it to the end, of so many in all."""
        live = {
            "behind": behind,
            "twice": 2 * behind,
            "all": microbatches,
            "ranks": ranks,
            "double": 2 * ranks - 1,
        }[self.live]
        return max(1, min(live, microbatches))

    def straight(self) -> Family:
        """The same without replicated stages."""
        return replace(self, replicas=False)

    @property
    def label(self) -> str:
        return self.schedule + (" with recomputation" if self.recompute == "always" else "")


FAMILIES = {
    "1f1b-sno": Family(schedule="1f1b-sno", live="behind", communication="exposed", replicas=True),
    "1f1b-so": Family(schedule="1f1b-so", live="twice", replicas=True),
    "1f1b": Family(schedule="1f1b", live="behind", recompute="allowed", replicas=True),
    "gpipe": Family(schedule="gpipe", live="all"),
    "gpipe+R": Family(schedule="gpipe", live="all", recompute="always"),
    "zb-h1": Family(schedule="zb-h1", live="ranks"),
    "zb-h2": Family(schedule="zb-h2", live="double"),
    "pipedream": Family(schedule="pipedream", live="behind", communication="exposed"),
    "1f1b-as": Family(schedule="1f1b-as", live="behind"),
    "fbp-as": Family(schedule="fbp-as", live="twice"),
}


def families_for(cluster: Cluster, *, paper: bool, wanted: str | None = None) -> dict[str, Family]:
    """The families that the cluster's execution allows: asynchronous ones only if every accelerator is.

    `wanted` is the schedule that is asked for, if one is.
    """
    kinds = {cluster.type_of(index).execution for index in range(len(cluster))}
    if kinds == {"asynchronous"}:
        return {name: FAMILIES[name] for name in ("1f1b-as", "fbp-as")}
    if paper:
        straight = ("1f1b-sno", "1f1b-so")
        return {name: FAMILIES[name].straight() for name in straight}
    # PipeDream trains another way, with stale weights: it is for comparison and must be asked for.
    return {
        name: family
        for name, family in FAMILIES.items()
        if not name.endswith("-as") and (name != "pipedream" or name == wanted)
    }


def optimal(
    chain: Chain,
    hardware: Hardware,
    family: Family,
    microbatches: int,
    *,
    num_stages: int | None = None,
    use_all: bool = False,
    replicas: bool = False,
    unlimited: bool = False,
    fast_links: bool = True,
) -> list[StageChoice]:
    """The optimal stages for a family of schedules (see `bapipe.partition.exact`); raises InfeasibleError."""
    cluster = hardware.cluster
    types = chain.types
    counts = [sum(item.type == name for item in cluster.accelerators) for name in types]
    order = None
    if cluster.topology == "chain" or len(types) > MOST_TYPES:
        order = tuple(types.index(item.type) for item in cluster.accelerators)
    total = len(cluster)
    link = cluster.within if fast_links or cluster.between is None else cluster.between
    width = total if replicas and family.replicas and num_stages is None else 1
    capacity = [np.inf if unlimited else cluster.types[name].memory for name in types]
    boundary = 2 * float(max(chain.boundary_forward.max(initial=0), chain.boundary_backward.max(initial=0)))
    problem = Problem.unlimited(
        forward=chain.forward,
        backward=chain.backward,
        counts=counts,
        order=order,
        send_forward=chain.boundary_forward[:-1] / link.bandwidth + link.latency,
        send_backward=chain.boundary_backward[:-1] / link.bandwidth + link.latency,
        duplex_half=link.duplex == "half",
        weights_bytes=chain.weight_bytes * hardware.static_copies(),
        stash_bytes=chain.stash,
        input_bytes=chain.input_bytes,
        gradient_bytes=chain.weight_bytes,
        capacity=np.array(capacity),
        overhead=np.full(len(types), chain.workspace + min(boundary, 0.02 * min(capacity))),
        microbatches=microbatches,
        inflight=np.array([family.inflight(d, num_stages or total, microbatches) for d in range(total + 1)]),
        max_replicas=width,
        reduce_rate=np.array([all_reduce_time(cluster, tuple(range(r)), 1.0) for r in range(width + 1)]),
        update=chain.update,
        recompute=family.recompute,
        num_stages=num_stages,
        use_all=use_all and num_stages is None,
        count_communication=family.communication,
    )
    solution = solve(problem)
    return _assign(
        cluster,
        [
            (stage.first_layer, stage.last_layer, types[stage.type], stage.replicas, stage.recompute)
            for stage in solution.stages
        ],
    )


def _assign(cluster: Cluster, stages: Sequence[tuple[int, int, str, int, bool]]) -> list[StageChoice]:
    """Concrete accelerators: along a chain the run that matches; else the next free ones, nodes kept together."""
    wanted = [kind for _, _, kind, count, _ in stages for _ in range(count)]
    kinds = [item.type for item in cluster.accelerators]
    if cluster.topology == "chain":
        offset = next(at for at in range(len(kinds)) if kinds[at : at + len(wanted)] == wanted)
        taken = list(range(offset, offset + len(wanted)))
    else:
        taken, free = [], list(range(len(kinds)))
        for kind in wanted:
            node = cluster.accelerators[taken[-1]].node if taken else None
            options = [index for index in free if kinds[index] == kind]
            near = [index for index in options if cluster.accelerators[index].node == node]
            taken.append((near or options)[0])
            free.remove(taken[-1])
    choices, at = [], 0
    for first, last, _, count, recompute in stages:
        members = tuple(taken[at : at + count])
        at += count
        choices.append(StageChoice(first=first, last=last, accelerators=members, recompute=recompute))
    return choices


def straight_stages(cuts: Sequence[int], accelerators: Sequence[int]) -> list[StageChoice]:
    """Stages from last units, one accelerator each."""
    return [
        StageChoice(first=first, last=last, accelerators=(index,))
        for first, last, index in zip(starts(cuts), cuts, accelerators, strict=True)
    ]


def require_layers(chain: Chain, stages: int) -> None:
    """Refuse more stages than there are layers to cut between."""
    if stages > len(chain):
        raise BaPipeError(
            f"{stages} stages need at least {stages} layers, {chain.profile.model.name} has {len(chain)}; "
            "lower --stages"
        )


def build(
    chain: Chain, stages: Sequence[StageChoice], family: Family, microbatches: int, hardware: Hardware
) -> Candidate:
    """The candidate that runs these stages under the family's schedule.

    1f1b takes the least K with which no transfer delays it, less where memory does not allow so many.
    """
    counts = [len(stage.accelerators) for stage in stages]
    caps: list[int] | None = None
    if family.schedule == "1f1b":
        caps = _least_caps(chain, stages, microbatches, hardware)
    schedule = _schedule(family, counts, microbatches, caps)
    shape = f"{len(stages)} stages" if max(counts) == 1 else "stages " + "-".join(map(str, counts))
    again = sum(stage.recompute for stage in stages)
    label = f"{family.label}, {shape}"
    if again and family.recompute != "always":
        label += f", {again} recomputing"
    return Candidate(label=label, chain=chain, stages=tuple(stages), schedule=schedule)


def _schedule(family: Family, counts: list[int], microbatches: int, caps: list[int] | None) -> Schedule:
    N, behind = len(counts), [sum(counts[stage:]) for stage in range(len(counts))]
    if caps is None and family.schedule in ("1f1b-sno", "1f1b-so", "1f1b-as", "gpipe"):
        caps = [family.inflight(ranks, sum(counts), microbatches) for ranks in behind]
    if caps is None or family.schedule == "fbp-as":
        return SCHEDULES[family.schedule](N, microbatches)
    sending: Literal["cut-through", "after-compute"] = (
        "cut-through" if family.schedule.endswith("-as") else "after-compute"
    )
    return capped(N, microbatches, caps, name=family.schedule, replicas=counts, sending=sending)


def _least_caps(chain: Chain, stages: Sequence[StageChoice], microbatches: int, hardware: Hardware) -> list[int]:
    cluster = hardware.cluster
    forward, backward, most = [], [], []
    for stage in stages:
        span, count = slice(stage.first, stage.last + 1), len(stage.accelerators)
        row = chain.row(cluster.accelerators[stage.accelerators[0]].type)
        ahead = float(chain.forward[row, span].sum())
        forward.append(ahead / count)
        backward.append((float(chain.backward[row, span].sum()) + (ahead if stage.recompute else 0.0)) / count)
        most.append(_most_live(chain, stage, hardware) * count)
    links = [
        cluster.link(one.accelerators[-1], other.accelerators[0]) for one, other in itertools.pairwise(stages)
    ]
    sends = [
        [
            float(sizes[stage.last]) / link.bandwidth + link.latency
            for stage, link in zip(stages[:-1], links, strict=True)
        ]
        for sizes in (chain.boundary_forward, chain.boundary_backward)
    ]
    wanted = full_overlap_caps(forward, backward, *sends)
    caps = []
    for index, cap in enumerate(wanted):
        behind = sum(len(stage.accelerators) for stage in stages[index:])
        caps.append(max(min(max(cap, behind), most[index], microbatches), min(behind, microbatches), 1))
    for index in range(len(caps) - 2, -1, -1):
        caps[index] = max(caps[index], caps[index + 1])
    return caps


def _most_live(chain: Chain, stage: StageChoice, hardware: Hardware) -> int:
    """Micro-batches that one replica of the stage has memory for, beside its weights."""
    needed = stage_bytes(chain, stage.first, stage.last)
    each = needed.kept if stage.recompute else needed.stash
    room = min(hardware.cluster.type_of(index).memory for index in stage.accelerators)
    room -= needed.weights * hardware.static_copies() + needed.buffers + needed.workspace
    room -= needed.stash if stage.recompute else 0.0
    return 2**30 if each <= 0 else max(0, int(room // each))


def interleaved_candidate(
    chain: Chain, hardware: Hardware, microbatches: int, *, ranks: int, virtual: int
) -> Candidate:
    """Interleaved 1F1B on alike accelerators: N·v balanced stages dealt round-robin; raises if that cannot be."""
    cluster = hardware.cluster
    if len(chain.types) > 1 or cluster.topology == "chain":
        raise BaPipeError("interleaving needs alike accelerators, each connected to any other")
    if ranks * virtual > len(chain):
        raise InfeasibleError(f"{ranks * virtual} stages need as many layers, got {len(chain)}")
    link = cluster.within
    problem = Problem.unlimited(
        forward=chain.forward,
        backward=chain.backward,
        counts=[ranks * virtual],
        microbatches=microbatches,
        send_forward=chain.boundary_forward[:-1] / link.bandwidth + link.latency,
        send_backward=chain.boundary_backward[:-1] / link.bandwidth + link.latency,
        num_stages=ranks * virtual,
    )
    stages = tuple(
        StageChoice(first=stage.first_layer, last=stage.last_layer, accelerators=(index % ranks,))
        for index, stage in enumerate(solve(problem).stages)
    )
    return Candidate(
        label=f"interleaved, {ranks} accelerators with {virtual} stages each",
        chain=chain,
        stages=stages,
        schedule=interleaved(ranks, microbatches, virtual=virtual),
    )
