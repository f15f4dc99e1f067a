"""A candidate — stages on accelerators, and a schedule — timed and weighed against the cluster's memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from bapipe.costs.peak_memory import PeakBytes, rank_peaks
from bapipe.costs.planned_optimizer import PlannedOptimizer
from bapipe.costs.profile import Profile
from bapipe.costs.segments import Chain, holds_all_weights
from bapipe.costs.stage_memory import StageBytes, stage_gradients, stages_bytes
from bapipe.costs.stage_time import StageSeconds, stage_seconds
from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import Cluster
from bapipe.planner.gradient_rings import all_reduce_time, gradient_sum_time, shared_uplinks
from bapipe.planner.partition.paper.step_record import Step
from bapipe.planner.stand_ins import stand_ins
from bapipe.records.plan import Plan
from bapipe.schedule.actions import Schedule
from bapipe.schedule.generators import with_recompute, with_update
from bapipe.simulator.lowering import Network, Route
from bapipe.simulator.simulate import Costs, ReplicaCosts, simulate
from bapipe.simulator.timeline import Timeline

__all__ = [
    "DDP_BUCKET",
    "Candidate",
    "Evaluation",
    "Hardware",
    "StageChoice",
    "accelerators_of_ranks",
    "all_reduce_time",
    "as_run",
    "evaluate",
    "is_data_parallel",
    "network_of",
    "plan_timeline",
    "replica_rows",
    "run_costs",
    "seconds_of",
    "shared_sums",
    "stage_costs",
    "unreplicated",
]

DDP_BUCKET = 25e6
"""bytes of gradients that torch's DDP reduces at once by default; the last such bucket cannot overlap"""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageChoice:
    """Units [first, last] on some accelerators, one per replica."""

    first: int
    last: int
    accelerators: tuple[int, ...]
    recompute: bool = False


def unreplicated(stages: Sequence[StageChoice]) -> bool:
    """Whether every stage has one accelerator: pipeline parallelism without data parallelism."""
    return all(len(stage.accelerators) == 1 for stage in stages)


def is_data_parallel(stages: Sequence[StageChoice]) -> bool:
    """Whether several accelerators each hold the whole model."""
    return len(stages) == 1 and len(stages[0].accelerators) > 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """One way to train: what the planner compares."""

    label: str
    """how a person calls it, such as "1f1b-so, 4 stages" """
    chain: Chain
    stages: tuple[StageChoice, ...]
    schedule: Schedule
    """without R, A and U; `evaluate` adds them"""
    steps: tuple[Step, ...] = ()
    """how its partition came about, where that was recorded"""
    copies: int = 1
    """replicas of all of it, with micro-batches by turns: the schedule is that of one, and `stages` has the
    accelerators of all, in the order of `replicated_pipelines`"""

    @property
    def num_microbatches(self) -> int:
        """Of the global batch, all replicas together."""
        return self.copies * self.schedule.num_microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The cluster and the rules that turn a profile into memory and time."""

    cluster: Cluster
    optimizer: PlannedOptimizer = field(default_factory=PlannedOptimizer)
    overlap_all_reduce: bool = True
    """data parallelism reduces a bucket as soon as its gradients are there, as DDP does"""

    def static_copies(self) -> float:
        """Weights, gradients and optimizer state, in copies of the weights that are trained."""
        return 2 + self.optimizer.memory.state

    def update_copies(self) -> float:
        """Those and what the optimizer's step makes besides."""
        return self.static_copies() + self.optimizer.memory.workspace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """What a candidate takes."""

    candidate: Candidate
    schedule: Schedule
    """as run: with recomputation, all-reduce and optimizer step; of copies, those that stand for all"""
    ranks: tuple[int, ...]
    """the accelerator of each of its ranks, by index"""
    costs: Costs
    timeline: Timeline
    peaks: tuple[PeakBytes, ...]
    """on the accelerator of each stage that has least to spare, all its stages together"""
    rank_peaks: tuple[PeakBytes, ...]
    """on every rank of the schedule"""
    capacity: tuple[float, ...]
    inflight: tuple[float, ...]
    """in-flight micro-batches per replica of each stage, at most"""
    stage_seconds: StageSeconds
    """what each stage takes per micro-batch"""
    stage_bytes: tuple[StageBytes, ...]
    """what each stage holds, by part"""
    crowding: Mapping[object, float] = field(default_factory=dict)
    """of each uplink, the transfers of all copies that one of the schedule's stands for"""

    @property
    def samples(self) -> int:
        return self.candidate.chain.microbatch * self.candidate.num_microbatches

    @property
    def memory(self) -> tuple[float, ...]:
        """Peak bytes of each stage's accelerators."""
        return tuple(peak.total for peak in self.peaks)

    @property
    def overhead(self) -> float:
        """Seconds of a step beside its actions, where the profile knows them."""
        chain = self.candidate.chain
        return max(chain.profile.table(name).step_overhead or 0.0 for name in chain.types)

    @property
    def time(self) -> float:
        """Seconds of a step."""
        return self.timeline.time + self.overhead

    @property
    def throughput(self) -> float:
        return self.samples / self.time

    @property
    def short(self) -> tuple[int, float] | None:
        """The stage that lacks most memory and how many bytes, or None if all fits."""
        lacking = [need - have for need, have in zip(self.memory, self.capacity, strict=True)]
        stage = max(range(len(lacking)), key=lacking.__getitem__)
        return (stage, lacking[stage]) if lacking[stage] > 0 else None


def network_of(
    cluster: Cluster,
    ranks: tuple[int, ...],
    schedule: Schedule,
    crowding: Mapping[object, float] | None = None,
) -> Network:
    """The routes between the ranks that talk to each other; amounts are bytes.

    `crowding` has the transfers that one stands for on an uplink (`stand_ins`).
    """
    routes = {}
    for boundary in range(schedule.num_stages - 1):
        # Not every replica talks to every other.
        for source, target in dict.fromkeys(schedule.meetings(boundary)):
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
                    (key, (crowding or {}).get(key, 1.0) / uplink.bandwidth)
                    for key, uplink in cluster.uplinks(*ends)
                )
                slowest = max((1 / bandwidth, *(rate for _, rate in uplinks)))
                routes[pair] = Route(seconds_per_unit=slowest, latency=link.latency, link=shared, uplinks=uplinks)
    return Network(routes=routes)


def shared_sums(
    profile: Profile, cluster: Cluster, divided: Sequence[Collection[int]], members: Sequence[tuple[int, ...]]
) -> list[float]:
    """Seconds that each stage sums gradients of divided layers of which every part holds all weights.

    `divided` has the layers of which a stage has only a part, `members` its accelerators. The stages sum after the
    last backward and before the optimizer step; that the later ones wait for the first is not counted.
    """
    seconds = [0.0] * len(divided)
    for layer in sorted({layer for layers in divided for layer in layers}):
        if not holds_all_weights(profile.layers[layer]):
            continue
        holders = [stage for stage, layers in enumerate(divided) if layer in layers]
        group = tuple(dict.fromkeys(index for stage in holders for index in members[stage]))
        for stage in holders:
            seconds[stage] += gradient_sum_time(cluster, group, float(profile.gradient_bytes[layer]))
    return seconds


def _divided(candidate: Candidate) -> list[set[int]]:
    """Layers of which each stage has only a part: they lie at its ends."""
    units, found = candidate.chain.units, []
    for stage in candidate.stages:
        first, last = units[stage.first], units[stage.last]
        inside = ((first, first.start > 0), (last, last.stop < last.of))
        found.append({unit.layer for unit, cut in inside if cut})
    return found


def stage_costs(candidate: Candidate, hardware: Hardware) -> Costs:
    """What each action of the candidate's stages takes; its schedule does not matter, and replicas are taken to
    have as many micro-batches each."""
    return _costs(candidate, hardware, seconds_of(candidate.chain, candidate.stages, hardware.cluster), None)


def run_costs(candidate: Candidate, hardware: Hardware, seconds: StageSeconds | None = None) -> Costs:
    """What each action takes as its schedule runs it: without a flush the optimizer steps in each backward."""
    seconds = seconds or seconds_of(candidate.chain, candidate.stages, hardware.cluster)
    costs = _costs(candidate, hardware, seconds, candidate.schedule)
    return costs if candidate.schedule.flushes else _updating_always(costs)


def _costs(candidate: Candidate, hardware: Hardware, seconds: StageSeconds, schedule: Schedule | None) -> Costs:
    chain, cluster, reduce = candidate.chain, hardware.cluster, []
    summing = shared_sums(
        chain.profile, cluster, _divided(candidate), [stage.accelerators for stage in candidate.stages]
    )
    forward, backward = tuple(seconds.forward.tolist()), tuple(seconds.backward.tolist())
    beside = shared_uplinks(cluster, [stage.accelerators for stage in candidate.stages])
    replicas = _replica_costs(candidate, cluster, summing)
    for index, stage in enumerate(candidate.stages):
        gradients = stage_gradients(chain, stage.first, stage.last)
        whole = gradient_sum_time(cluster, stage.accelerators, gradients, beside=beside)
        if len(candidate.stages) == 1 and hardware.overlap_all_reduce:
            bucket = gradient_sum_time(cluster, stage.accelerators, min(DDP_BUCKET, gradients))
            last = _ends_last(schedule, replicas)
            hidden = backward[index] if last is None else last.backward
            whole = max(bucket, whole - cluster.collective_overlap * hidden)
        reduce.append(whole)
    cuts = [stage.last for stage in candidate.stages[:-1]]
    return Costs(
        forward=forward,
        backward=backward,
        send_forward=tuple(float(chain.boundary_forward[cut]) for cut in cuts),
        send_backward=tuple(float(chain.boundary_backward[cut]) for cut in cuts),
        input_gradient=tuple((seconds.backward - seconds.weight_gradient).tolist()),
        weight_gradient=tuple((seconds.weight_gradient + seconds.parting).tolist()),
        recompute=forward,
        all_reduce=tuple(reduce),
        update=tuple((np.array(summing) + seconds.update).tolist()),
        replicas=replicas,
        unanswered=tuple(index for index, cut in enumerate(cuts) if not chain.answered[cut]),
    )


def _replica_costs(
    candidate: Candidate, cluster: Cluster, summing: Sequence[float]
) -> tuple[tuple[ReplicaCosts, ...], ...] | None:
    """Of stages whose replicas are of several types what each takes; None where there are none.

    Copies of a part of the cluster are alike.
    """
    if candidate.copies > 1 or len(candidate.chain.types) == 1:
        return None
    found = []
    for stage, more in zip(candidate.stages, summing, strict=True):
        rows = replica_rows(candidate.chain, stage, cluster)
        span = (stage.first, stage.last)
        each = {row: _alone(stage_seconds(candidate.chain, [span], [{row}]), more) for row in set(rows)}
        found.append(tuple(each[row] for row in rows) if len(each) > 1 else ())
    return tuple(found) if any(found) else None


def replica_rows(chain: Chain, stage: StageChoice, cluster: Cluster) -> list[int]:
    """Of each replica of a stage, the chain's row of its accelerator's type."""
    return [chain.row(cluster.accelerators[index].type) for index in stage.accelerators]


def _alone(seconds: StageSeconds, summing: float) -> ReplicaCosts:
    """Of the only stage in `seconds`."""
    forward, backward, weight, parting, update = (
        float(values[0])
        for values in (
            seconds.forward,
            seconds.backward,
            seconds.weight_gradient,
            seconds.parting,
            seconds.update,
        )
    )
    return ReplicaCosts(
        forward=forward,
        backward=backward,
        input_gradient=backward - weight,
        weight_gradient=weight + parting,
        recompute=forward,
        update=summing + update,
    )


def _ends_last(
    schedule: Schedule | None, replicas: tuple[tuple[ReplicaCosts, ...], ...] | None
) -> ReplicaCosts | None:
    """Of data parallelism over several types, the replica whose micro-batches take longest."""
    if replicas is None:
        return None
    counts = (1,) * len(replicas[0]) if schedule is None else schedule.microbatch_counts(0)
    both = zip(counts, replicas[0], strict=True)
    return max(both, key=lambda own: own[0] * (own[1].forward + own[1].backward))[1]


def seconds_of(chain: Chain, stages: Sequence[StageChoice], cluster: Cluster) -> StageSeconds:
    """What the stages take, each on the slowest of its accelerators."""
    types = [{chain.row(cluster.accelerators[index].type) for index in stage.accelerators} for stage in stages]
    return stage_seconds(chain, [(stage.first, stage.last) for stage in stages], types)


def evaluate(candidate: Candidate, hardware: Hardware) -> Evaluation:
    """Simulate the candidate and weigh its memory. Linear in its actions, of copies in those of few."""
    schedule, copies = as_run(candidate), candidate.copies
    seconds = seconds_of(candidate.chain, candidate.stages, hardware.cluster)
    costs = run_costs(candidate, hardware, seconds)
    ranks = accelerators_of_ranks(candidate)
    crowding: Mapping[object, float] = {}
    if copies > 1:
        schedule, ranks, crowding = stand_ins(schedule, ranks, copies, hardware.cluster)
    timeline = simulate(schedule, costs, network_of(hardware.cluster, ranks, schedule, crowding))
    needed = stages_bytes(candidate.chain, [(stage.first, stage.last) for stage in candidate.stages], schedule)
    peaks = rank_peaks(
        schedule,
        timeline,
        needed,
        copies=hardware.static_copies(),
        update_copies=hardware.update_copies(),
        phases_known=candidate.chain.phases_known,
    )
    capacity, fullest = [], []
    for stage, placed in zip(candidate.stages, schedule.placement, strict=True):
        rooms = [hardware.cluster.type_of(index).memory for index in stage.accelerators]
        if copies > 1:
            rooms = [min(rooms)] * len(placed)
        # The replica that lacks most, or has least to spare.
        at = max(range(len(placed)), key=lambda place: (peaks[placed[place]].total - rooms[place], -place))
        capacity.append(rooms[at])
        fullest.append(peaks[placed[at]])
    return Evaluation(
        candidate=candidate,
        schedule=schedule,
        ranks=ranks,
        costs=costs,
        timeline=timeline,
        peaks=tuple(fullest),
        rank_peaks=tuple(peaks),
        capacity=tuple(capacity),
        inflight=_inflight(schedule, timeline),
        stage_seconds=seconds,
        stage_bytes=tuple(needed),
        crowding=crowding,
    )


def _inflight(schedule: Schedule, timeline: Timeline) -> tuple[float, ...]:
    """In-flight micro-batches of the replica of each stage that has most."""
    if schedule.dealing is not None:
        held = timeline.peak_in_flight_by_rank()
        return tuple(float(max(held[rank] for rank in ranks)) for ranks in schedule.placement)
    both = zip(timeline.peak_in_flight(), schedule.placement, strict=True)
    return tuple(float(-(-count // len(ranks))) for count, ranks in both)


def as_run(candidate: Candidate) -> Schedule:
    """The candidate's schedule with recomputation, all-reduce and optimizer step; of copies, that of one."""
    schedule = candidate.schedule
    chosen = [index for index, stage in enumerate(candidate.stages) if stage.recompute]
    if chosen:
        schedule = with_recompute(schedule, chosen)
    return with_update(schedule, replicas=candidate.copies) if schedule.flushes else schedule


def _updating_always(costs: Costs) -> Costs:
    """A pipeline that never flushes steps the optimizer after every backward: the step is part of it.

    The input gradient is sent before that step, so where a transfer is waited for this is a little too long.
    """
    backward = tuple(b + u for b, u in zip(costs.backward, costs.update, strict=True))
    return replace(costs, backward=backward, update=(0.0,) * len(costs.update))


def accelerators_of_ranks(candidate: Candidate) -> tuple[int, ...]:
    """The accelerator of each rank, by index, all copies together."""
    ranks = tuple(dict.fromkeys(index for stage in candidate.stages for index in stage.accelerators))
    wanted = candidate.copies * candidate.schedule.num_ranks
    if len(ranks) != wanted:
        raise BaPipeError(f"{candidate.label}: {len(ranks)} accelerators for {wanted} ranks")
    return ranks


def plan_timeline(plan: Plan) -> Timeline:
    """The predicted timeline of a plan, from what stands in it."""
    schedule = plan.schedule.to_schedule()
    names = [accelerator.name for accelerator in plan.cluster.accelerators]
    ranks = tuple(names.index(name) for name in plan.ranks)
    stages = plan.stages
    weight = [min(stage.weight_gradient, stage.backward) for stage in stages]
    costs = Costs(
        forward=tuple(stage.forward for stage in stages),
        backward=tuple(stage.backward for stage in stages),
        send_forward=tuple(stage.send_forward_bytes for stage in stages[:-1]),
        send_backward=tuple(stage.send_backward_bytes for stage in stages[1:]),
        input_gradient=tuple(stage.backward - part for stage, part in zip(stages, weight, strict=True)),
        weight_gradient=tuple(part + stage.parting for stage, part in zip(stages, weight, strict=True)),
        recompute=tuple(stage.forward for stage in stages),
        all_reduce=tuple(stage.all_reduce for stage in stages),
        update=tuple(stage.update for stage in stages),
        replicas=_planned_replicas(plan),
        unanswered=tuple(index for index, stage in enumerate(stages[1:]) if not stage.sends_gradient),
    )
    return simulate(schedule, costs, network_of(plan.cluster, ranks, schedule))


def _planned_replicas(plan: Plan) -> tuple[tuple[ReplicaCosts, ...], ...] | None:
    """What the replicas of a plan's stages take where they are not alike."""
    if all(stage.replicas is None for stage in plan.stages):
        return None
    return tuple(
        tuple(
            ReplicaCosts(
                forward=own.forward,
                backward=own.backward,
                input_gradient=own.backward - min(own.weight_gradient, own.backward),
                weight_gradient=min(own.weight_gradient, own.backward) + own.parting,
                recompute=own.forward,
                update=own.update,
            )
            for own in stage.replicas or ()
        )
        for stage in plan.stages
    )
