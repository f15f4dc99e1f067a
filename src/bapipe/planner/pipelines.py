"""Pipeline candidates: for one micro-batch size and one family of schedules, cut the chain and fit the caps."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bapipe.costs.segments import Chain
from bapipe.costs.stage_memory import UnitBytes
from bapipe.costs.stage_time import UnitSeconds
from bapipe.errors import BaPipeError, InfeasibleError
from bapipe.hardware.cluster import Cluster, Link
from bapipe.planner.candidate import Candidate, Hardware, StageChoice, layers_recomputing, stage_shape
from bapipe.planner.gradient_rings import gradient_sum_time
from bapipe.planner.inflight_caps import inflight_bytes, least_caps, weight_delays
from bapipe.planner.partition.exact.problem import Communication, Problem, Recompute, Solution
from bapipe.planner.partition.exact.solve import solve
from bapipe.planner.partition.paper.stage_cuts import starts
from bapipe.planner.request import Request
from bapipe.planner.tuning import DEFAULT_TUNING, Tuning
from bapipe.schedule.actions import Schedule
from bapipe.schedule.generators import SCHEDULES, capped
from bapipe.schedule.inflight import declining_caps, inflight_microbatches, ranks_behind, waiting_microbatches
from bapipe.schedule.zero_bubble import zero_bubble

__all__ = [
    "FAMILIES",
    "Family",
    "build",
    "families_for",
    "optimal",
    "permitted",
    "require_layers",
    "unreplicated_stages",
    "with_cuts",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A schedule as the planner sees it before the stages are known."""

    schedule: str
    communication: Literal["overlapped", "exposed"] = "overlapped"
    recompute: Literal["never", "allowed", "always"] = "never"
    replicas: bool = False
    """whether stages may be replicated"""
    cap: int | None = None
    """K of the first stage, where it is asked for, of 1f1b: see `declining_caps`"""

    def inflight(self, behind: int, ranks: int, microbatches: int) -> int:
        """Micro-batches at a stage with so many accelerators from it to the end, of so many in all."""
        return inflight_microbatches(self.schedule, behind, microbatches, ranks=ranks, first=self.cap)

    def waiting(self, behind: int, ranks: int, microbatches: int) -> int:
        """Micro-batches there that only wait for their weight gradients."""
        return waiting_microbatches(self.schedule, behind, microbatches, ranks=ranks)

    def unreplicated(self) -> Family:
        """The same without replicated stages."""
        return replace(self, replicas=False)

    @property
    def label(self) -> str:
        cap = "" if self.cap is None else f" with K = {self.cap}"
        return self.schedule + (" with recomputation" if self.recompute == "always" else cap)


FAMILIES = {
    "1f1b-sno": Family(schedule="1f1b-sno", communication="exposed", replicas=True),
    "1f1b-so": Family(schedule="1f1b-so", replicas=True),
    "1f1b": Family(schedule="1f1b", recompute="allowed", replicas=True),
    "gpipe": Family(schedule="gpipe"),
    "gpipe+R": Family(schedule="gpipe", recompute="always"),
    "zb": Family(schedule="zb"),
    "zb-h1": Family(schedule="zb-h1"),
    "zb-h2": Family(schedule="zb-h2"),
    "pipedream": Family(schedule="pipedream", communication="exposed"),
    "1f1b-as": Family(schedule="1f1b-as"),
    "fbp-as": Family(schedule="fbp-as"),
}


def families_for(
    cluster: Cluster, *, paper: bool, wanted: str | None = None, cap: int | None = None
) -> dict[str, Family]:
    """The families that the cluster's execution allows: asynchronous ones only if every accelerator is.

    `wanted` is the schedule that is asked for, if one is, and `cap` 1f1b's K.
    """
    kinds = {cluster.type_of(index).execution for index in range(len(cluster))}
    if kinds == {"asynchronous"}:
        return {name: FAMILIES[name] for name in ("1f1b-as", "fbp-as")}
    if paper:
        return {name: FAMILIES[name].unreplicated() for name in ("1f1b-sno", "1f1b-so")}
    # PipeDream trains another way, with stale weights: it is for comparison and must be asked for.
    return {
        name: replace(family, cap=cap if name == "1f1b" else None)
        for name, family in FAMILIES.items()
        if not name.endswith("-as") and (name != "pipedream" or name == wanted)
    }


def permitted(families: Mapping[str, Family], request: Request) -> dict[str, Family]:
    """Of these families what the request allows: whole stages recompute only where it lets them."""
    if request.whole_stages:
        return dict(families)
    never = {name: family for name, family in families.items() if family.recompute != "always"}
    return {name: replace(family, recompute="never") for name, family in never.items()}


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
    link: Link | None = None,
    order: tuple[int, ...] | None = None,
    tuning: Tuning = DEFAULT_TUNING,
) -> list[StageChoice]:
    """The optimal stages for a family of schedules; raises InfeasibleError (`bapipe.planner.partition.exact`).

    With `unlimited`, those without replicas if memory did not matter. Stages take accelerators of the chain's
    types in the given `order`, or in the best one. All neighbours are taken to have the one `link` (None: that
    within a node).
    """
    cluster = hardware.cluster
    types = chain.types
    counts = [sum(item.type == name for item in cluster.accelerators) for name in types]
    if cluster.topology == "chain" or len(types) > tuning.most_types:
        order = tuple(types.index(item.type) for item in cluster.accelerators)
    total = len(cluster)
    link = link or cluster.within
    width = total if replicas and family.replicas and num_stages is None else 1
    capacity = [cluster.types[name].memory for name in types]
    if unlimited:
        solution = _solve_unlimited(
            chain, tuple(counts), order, link, microbatches, family.recompute, family.communication, num_stages
        )
        return _assign(cluster, types, solution)
    seconds, units = UnitSeconds.of(chain), UnitBytes.of(chain)

    def held(behind: int) -> int:
        counts = (count(behind, num_stages or total, microbatches) for count in (family.inflight, family.waiting))
        return units.as_inflight(*counts)

    problem = Problem.unlimited(
        forward=seconds.forward,
        backward=seconds.backward,
        counts=counts,
        order=order,
        send_forward=chain.boundary_forward[:-1] / link.bandwidth + link.latency,
        send_backward=chain.return_seconds(link.bandwidth, link.latency)[:-1],
        duplex_half=link.duplex == "half",
        weights_bytes=units.always(hardware.static_copies()),
        saved_bytes=units.saved_activations,
        input_bytes=units.inputs,
        gradient_bytes=units.trained,
        capacity=np.array(capacity),
        overhead=np.full(len(types), units.overhead(min(capacity))),
        microbatches=microbatches,
        inflight=np.array([held(d) for d in range(total + 1)]),
        max_replicas=width,
        reduce_rate=_reduce_rates(cluster, width),
        update=seconds.update,
        recompute=family.recompute,
        num_stages=num_stages,
        use_all=use_all and num_stages is None,
        count_communication=family.communication,
    )
    stages = first = _assign(cluster, types, solve(problem, explained=False))
    times = 1
    for _ in range(tuning.memory_retries):
        lacking = _lacking(chain, stages, family, microbatches, hardware)
        if not any(lacking.values()):
            return stages
        more = np.ceil([times * lacking.get(name, 0.0) for name in types]).astype(np.int64)
        problem = replace(problem, overhead=problem.overhead + more)
        before = stages
        try:
            stages = _assign(cluster, types, solve(problem, explained=False))
        except InfeasibleError:
            break
        times = 2 * times if stages == before else 1
    return first


@functools.lru_cache(maxsize=8)
def _reduce_rates(cluster: Cluster, most: int) -> NDArray[np.float64]:
    """Seconds per byte of gradients that are summed among the first accelerators, by their number."""
    return np.array([gradient_sum_time(cluster, tuple(range(count)), 1.0) for count in range(most + 1)])


def _lacking(
    chain: Chain, stages: Sequence[StageChoice], family: Family, microbatches: int, hardware: Hardware
) -> dict[str, float]:
    """Bytes that some stage on each type of accelerator lacks.

    The exact partition goes by `UnitBytes`; what that leaves out depends on where stages end.
    """
    cluster = hardware.cluster
    ranks = sum(len(stage.accelerators) for stage in stages)
    behind, lacking = ranks, dict.fromkeys(chain.types, 0.0)
    for stage in stages:
        kind, count = cluster.accelerators[stage.accelerators[0]].type, len(stage.accelerators)
        inflight = -(-family.inflight(behind, ranks, microbatches) // count)
        waiting = family.waiting(behind, ranks, microbatches)
        behind -= count
        found = inflight_bytes(chain, stage, hardware)
        lacking[kind] = max(lacking[kind], inflight * found.each + waiting * found.delayed - found.room)
    return lacking


@functools.lru_cache(maxsize=128)
def _solve_unlimited(
    chain: Chain,
    counts: tuple[int, ...],
    order: tuple[int, ...] | None,
    link: Link,
    microbatches: int,
    recompute: Recompute,
    communication: Communication,
    num_stages: int | None,
) -> Solution:
    """The optimum without replicas if memory did not matter: then families differ in little."""
    units = UnitSeconds.of(chain)
    return solve(
        Problem.unlimited(
            forward=units.forward,
            backward=units.backward,
            counts=counts,
            order=order,
            send_forward=chain.boundary_forward[:-1] / link.bandwidth + link.latency,
            send_backward=chain.return_seconds(link.bandwidth, link.latency)[:-1],
            duplex_half=link.duplex == "half",
            gradient_bytes=UnitBytes.of(chain).trained,
            microbatches=microbatches,
            update=units.update,
            recompute=recompute,
            num_stages=num_stages,
            count_communication=communication,
        )
    )


def _assign(cluster: Cluster, types: Sequence[str], solution: Solution) -> list[StageChoice]:
    """Concrete accelerators: along a chain the run that matches; else the next free ones, nodes kept together."""
    stages = [
        (stage.first_layer, stage.last_layer, types[stage.type], stage.replicas, stage.recompute)
        for stage in solution.stages
    ]
    wanted = [kind for _, _, kind, count, _ in stages for _ in range(count)]
    kinds = [item.type for item in cluster.accelerators]
    if cluster.topology == "chain":
        offset = next(at for at in range(len(kinds)) if kinds[at : at + len(wanted)] == wanted)
        taken = list(range(offset, offset + len(wanted)))
    else:
        taken, free = [], list(range(len(kinds)))
        for kind in wanted:
            options = [index for index in free if kinds[index] == kind]
            taken.append(_nearest(cluster, taken[-1], options) if taken else options[0])
            free.remove(taken[-1])
    choices, at = [], 0
    for first, last, _, count, recompute in stages:
        members = tuple(taken[at : at + count])
        at += count
        choices.append(StageChoice(first=first, last=last, accelerators=members, recompute=recompute))
    return choices


def _nearest(cluster: Cluster, last: int, options: Sequence[int]) -> int:
    """The first of those accelerators that have most groups in common with the last one."""
    own = cluster.place(last)
    beside = next((index for index in options if cluster.place(index) == own), None)
    if beside is not None:
        return beside

    def common(index: int) -> int:
        pairs = zip(own, cluster.place(index), strict=True)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    return max(options, key=common)


def unreplicated_stages(cuts: Sequence[int], accelerators: Sequence[int]) -> list[StageChoice]:
    """Stages from last units, one accelerator each."""
    return [
        StageChoice(first=first, last=last, accelerators=(index,))
        for first, last, index in zip(starts(cuts), cuts, accelerators, strict=True)
    ]


def with_cuts(stages: Sequence[StageChoice], cuts: Sequence[int]) -> tuple[StageChoice, ...]:
    """The same stages with these last units."""
    return tuple(
        replace(stage, first=first, last=last)
        for stage, first, last in zip(stages, starts(cuts), cuts, strict=True)
    )


def require_layers(chain: Chain, stages: int) -> None:
    """Refuse more stages than there are layers to cut between."""
    if stages > len(chain):
        raise BaPipeError(
            f"{stages} stages need at least {stages} layers, {chain.profile.model.name} has {len(chain)}; "
            "lower --stages"
        )


def build(
    chain: Chain,
    stages: Sequence[StageChoice],
    family: Family,
    microbatches: int,
    hardware: Hardware,
    tuning: Tuning = DEFAULT_TUNING,
) -> Candidate:
    """The candidate that runs these stages under the family's schedule.

    1f1b takes the K that is asked for; else it and zb the least with which no transfer delays them, less where
    memory does not allow so many; zb then defers weight gradients as long as memory allows.
    """
    counts = [len(stage.accelerators) for stage in stages]
    caps: list[int] | None = None
    delays: list[int] | None = None
    if family.schedule in ("1f1b", "zb"):
        caps = (
            least_caps(chain, stages, microbatches, hardware)
            if family.cap is None
            else declining_caps(family.cap, counts, microbatches)
        )
    if family.schedule == "zb":
        assert caps is not None
        delays = weight_delays(chain, stages, caps, hardware, tuning)
    kept = len(stages) * microbatches <= tuning.kept_schedule_size
    schedule = _schedule(family, counts, microbatches, caps, delays, kept=kept)
    again = sum(stage.recompute for stage in stages)
    label = f"{family.label}, {stage_shape(counts)}"
    if again and family.recompute != "always":
        label += f", {again} recomputing"
    label += layers_recomputing(chain)
    return Candidate(label=label, chain=chain, stages=tuple(stages), schedule=schedule)


def _schedule(
    family: Family,
    counts: list[int],
    microbatches: int,
    caps: list[int] | None,
    delays: list[int] | None,
    *,
    kept: bool,
) -> Schedule:
    if caps is None and family.schedule in ("1f1b-sno", "1f1b-so", "1f1b-as", "gpipe"):
        caps = [family.inflight(behind, sum(counts), microbatches) for behind in ranks_behind(counts)]
    own = None if caps is None or family.schedule == "fbp-as" else tuple(caps)
    return (_make_schedule if kept else _make_schedule.__wrapped__)(
        family.schedule, tuple(counts), microbatches, own, None if delays is None else tuple(delays)
    )


@functools.lru_cache(maxsize=8)
def _make_schedule(
    name: str,
    counts: tuple[int, ...],
    microbatches: int,
    caps: tuple[int, ...] | None,
    delays: tuple[int, ...] | None,
) -> Schedule:
    """A family tries many cuts of one shape in a row; their schedule, and its lowering, is the same."""
    if caps is None:
        return SCHEDULES[name](len(counts), microbatches)
    if delays is not None:
        return zero_bubble(len(counts), microbatches, caps, delays=delays)
    sending: Literal["cut-through", "after-compute"] = "cut-through" if name.endswith("-as") else "after-compute"
    return capped(len(counts), microbatches, caps, name=name, replicas=counts, sending=sending)
