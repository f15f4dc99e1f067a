"""What each action of a candidate takes: its stages" seconds, messages, all-reduces and optimizer steps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np

from bapipe.costs.held_weights import stage_gradients
from bapipe.costs.profile import Profile
from bapipe.costs.segments import Chain, holds_all_weights
from bapipe.costs.stage_time import StageSeconds, stage_seconds
from bapipe.hardware.cluster import Cluster
from bapipe.planner.candidate import Candidate, Hardware, StageChoice
from bapipe.planner.fsdp_events import fsdp_seconds
from bapipe.planner.gradient_rings import (
    all_gather,
    gradient_sum,
    gradient_sum_time,
    reduce_scatter,
    shared_uplinks,
)
from bapipe.schedule.actions import Schedule
from bapipe.simulator.action_costs import Costs, ReplicaCosts

__all__ = ["DDP_BUCKET", "replica_rows", "run_costs", "seconds_of", "shared_sums", "stage_costs"]


DDP_BUCKET = 25e6
"""bytes of gradients that torch's DDP reduces at once by default; the last such bucket cannot overlap"""


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


def run_costs(
    candidate: Candidate, hardware: Hardware, seconds: StageSeconds | None = None, *, simulated: int = 1
) -> Costs:
    """What each action takes as its schedule runs it: without a flush the optimizer steps in each backward.

    Of the candidate's copies so many are `simulated` (`stand_ins`).
    """
    seconds = seconds or seconds_of(candidate.chain, candidate.stages, hardware.cluster)
    costs = _costs(candidate, hardware, seconds, candidate.schedule)
    if simulated > 1 and costs.replicas is not None:
        all_of = tuple(tuple(own for own in each for _ in range(simulated)) for each in costs.replicas)
        costs = replace(costs, replicas=all_of)
    if candidate.engine == "fsdp":
        return _fsdp_costs(candidate, hardware, costs)
    if candidate.zero:
        costs = _shared_update(candidate, hardware.cluster, costs)
    return costs if candidate.schedule.flushes else _updating_always(costs)


def _shared_update(candidate: Candidate, cluster: Cluster, costs: Costs) -> Costs:
    """Where replicas share the optimizer step: each its part, and then the weights of all."""
    chain, update = candidate.chain, list(costs.update)
    shared = []
    for index, stage in enumerate(candidate.stages):
        count, size = len(stage.accelerators), stage_gradients(chain, stage.first, stage.last)
        gather = all_gather(cluster, stage.accelerators).seconds_if_any(size)
        shared.append((1 / count, gather))
        update[index] = update[index] / count + gather
    replicas = costs.replicas
    if replicas is not None:
        replicas = tuple(
            tuple(replace(own, update=own.update * part + gather) for own in each)
            for each, (part, gather) in zip(replicas, shared, strict=True)
        )
    return replace(costs, update=tuple(update), replicas=replicas)


def _fsdp_costs(candidate: Candidate, hardware: Hardware, costs: Costs) -> Costs:
    """What FSDP2 sends is part of its forwards and backwards; each rank steps its share of the weights."""
    members = candidate.stages[0].accelerators
    rows = sorted(set(replica_rows(candidate.chain, candidate.stages[0], hardware.cluster)))
    found = fsdp_seconds(candidate.chain, hardware.cluster, members, rows)
    return replace(
        costs,
        forward=(found.forward,),
        backward=(found.backward,),
        input_gradient=(0.0,),
        weight_gradient=(found.backward,),
        recompute=(found.forward,),
        all_reduce=(0.0,),
        update=(costs.update[0] / len(members),),
        replicas=None,
    )


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
        summed = reduce_scatter if candidate.zero else gradient_sum
        sums = summed(cluster, stage.accelerators, beside=beside)
        whole = sums.seconds_if_any(gradients)
        if len(candidate.stages) == 1 and hardware.overlap_all_reduce:
            bucket = sums.seconds_if_any(min(DDP_BUCKET, gradients))
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

    Copies of a part of the cluster are alike: those of the first.
    """
    if len(candidate.chain.types) == 1:
        return None
    found = []
    for stage, more in zip(candidate.stages, summing, strict=True):
        rows = replica_rows(candidate.chain, stage, cluster)[:: candidate.copies]
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


def _updating_always(costs: Costs) -> Costs:
    """A pipeline that never flushes steps the optimizer after every backward: the step is part of it.

    The input gradient is sent before that step, so where a transfer is waited for this is a little too long.
    """
    backward = tuple(b + u for b, u in zip(costs.backward, costs.update, strict=True))
    return replace(costs, backward=backward, update=(0.0,) * len(costs.update))
