"""What a plan holds beyond a split into equal pipelines of one stage per rank, in words that say what of it."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from bapipe.errors import BaPipeError
from bapipe.records.plan import Plan
from bapipe.records.plan_consistency import microbatch_sizes
from bapipe.schedule.actions import Kind, Lane, Schedule
from bapipe.schedule.generators import make_schedule

__all__ = [
    "Feature",
    "features_of",
    "one_pipeline",
    "replicas_of",
    "require_pipeline",
    "same_order",
    "torch_order",
    "without_extras",
]

_ENGINES_NAMES = {"1f1b-sno": "1F1B", "interleaved": "interleaved 1F1B"}
"""schedules as other engines call them"""


class Feature(enum.Enum):
    """Something that a plan may hold; the value is what the tables call it."""

    INNER_CUTS = "cuts inside of a block"
    ORDER = "order of the actions"
    STAGES_PER_RANK = "several stages per rank"
    UNEVEN_STAGES = "uneven number of stages per rank"
    PLACEMENT = "stages on ranks in another order than round-robin"
    REPLICAS = "replicas of the whole pipeline"
    UNEVEN_REPLICAS = "uneven replicas"
    SPLIT_LAYERS = "split layers"
    RECOMPUTATION = "activation checkpointing"
    TIED = "tied weights between stages"
    SHORT_BATCH = "short last micro-batch"
    MIXED_PRECISION = "mixed precision"
    DEVICES = "which accelerator a rank is"


def require_pipeline(plan: Plan) -> None:
    """Refuse plans that have no pipeline which another engine could run."""
    schedule = plan.schedule
    if plan.deployment is not None or schedule.concurrency != "none" or schedule.sending != "after-compute":
        raise BaPipeError(f"a plan for FPGAs ({schedule.name}) has no counterpart in other engines; plan for GPUs")
    if not schedule.flushes:
        raise BaPipeError(
            f"{schedule.name} trains with several weight versions, which no other engine does; plan with another "
            "--schedule, such as 1f1b-sno"
        )
    if len(plan.stages) == 1:
        raise BaPipeError(
            f"the plan is {plan.kind} on {len(plan.ranks)} accelerators and has one stage, so there is nothing to "
            "cut; use the engine's data parallelism, or plan with --stages"
        )


def replicas_of(plan: Plan) -> int | None:
    """Replicas of the whole pipeline; None: its stages have different numbers of them."""
    counts = {len(stage.accelerators) for stage in plan.stages}
    return counts.pop() if len(counts) == 1 else None


def torch_order(plan: Plan) -> Schedule:
    """The order without what torch's engine adds by itself: recomputation, gradient sync, optimizer step."""
    return without_extras(plan.schedule.to_schedule())


def without_extras(schedule: Schedule) -> Schedule:
    """An order without recomputation, gradient sync and optimizer step."""
    return replace(schedule, lanes=tuple(_computing(lane) for lane in schedule.lanes))


def _computing(lane: Lane) -> Lane:
    kept = ~np.isin(lane.kinds, (Kind.R, Kind.A, Kind.U))
    return Lane(lane.rank, lane.kinds[kept], lane.stages[kept], lane.microbatches[kept], lane.name)


def one_pipeline(plan: Plan) -> Schedule | None:
    """The order of one replica of the pipeline, its micro-batches numbered from 0; None: replicas are uneven."""
    count = replicas_of(plan)
    schedule = torch_order(plan)
    if count == 1:
        return schedule
    if count is None or schedule.num_microbatches % count:
        return None
    numbers = {rank: place for place, rank in enumerate(dict.fromkeys(ranks[0] for ranks in schedule.placement))}
    lanes = []
    for lane in schedule.lanes:
        if lane.rank in numbers:
            if np.any(lane.microbatches % count):
                return None
            lanes.append(Lane(numbers[lane.rank], lane.kinds, lane.stages, lane.microbatches // count, lane.name))
    return replace(
        schedule,
        num_microbatches=schedule.num_microbatches // count,
        placement=tuple((numbers[ranks[0]],) for ranks in schedule.placement),
        lanes=tuple(sorted(lanes, key=lambda lane: lane.rank)),
        caps=None,
    )


def same_order(schedule: Schedule | None, name: str) -> bool:
    """Whether every rank runs its actions as the schedule of that name would."""
    if schedule is None:
        return False
    ranks = schedule.num_ranks
    if name == "interleaved":
        if schedule.num_stages % ranks or schedule.num_microbatches % ranks:
            return False
        other = make_schedule(name, ranks, schedule.num_microbatches, virtual=schedule.num_stages // ranks)
    elif ranks != schedule.num_stages:
        return False
    else:
        other = make_schedule(name, schedule.num_stages, schedule.num_microbatches)
    return schedule.placement == other.placement and schedule.lanes == other.lanes


def features_of(plan: Plan, *, moved: tuple[str, ...] = (), own_order: str | None = None) -> Mapping[Feature, str]:
    """What the plan holds of each feature; those that it does not use are left out.

    `moved` says which cuts inside of blocks had to move, `own_order` which schedule the target would run by
    itself: a plan with just that order loses none.
    """
    found: dict[Feature, str] = {}
    if moved:
        found[Feature.INNER_CUTS] = "; ".join(moved)
    pipeline = one_pipeline(plan)
    if own_order is None or not same_order(pipeline, own_order):
        instead = f", {_ENGINES_NAMES[own_order]} runs instead" if own_order else ""
        found[Feature.ORDER] = f"the order of {plan.schedule.name}{instead}"
    _add_placement(plan, found)
    _add_replicas(plan, found)
    split = [str(part.layer) for stage in plan.stages for part in stage.fractions]
    if split:
        layers = ", ".join(dict.fromkeys(split))
        found[Feature.SPLIT_LAYERS] = f"layers {layers} are split between stages by channels"
    again = [str(index) for index, stage in enumerate(plan.stages) if stage.recompute]
    runs = [f"{run.first}-{run.last}" for stage in plan.stages for run in stage.recompute_layers]
    if again or runs:
        whole = [f"stages {', '.join(again)} recompute their forward"] if again else []
        found[Feature.RECOMPUTATION] = ", ".join(
            whole + [f"layers {', '.join(runs)} recompute theirs"][: len(runs)]
        )
    tied = [(index, name) for index, stage in enumerate(plan.stages) for name in stage.tied]
    if tied:
        shared = "; ".join(f"stage {index} shares weights of '{name}'" for index, name in tied)
        found[Feature.TIED] = shared
    sizes = microbatch_sizes(plan)
    if sizes[-1] != sizes[0]:
        found[Feature.SHORT_BATCH] = f"the last micro-batch has {sizes[-1]} of {sizes[0]} samples"
    if plan.dtype.endswith("-mixed"):
        found[Feature.MIXED_PRECISION] = (
            f"the plan is for {plan.dtype}, the script computes in the model's own dtype"
        )
    kinds = {accelerator.name: accelerator.type for accelerator in plan.cluster.accelerators}
    if len({kinds[name] for name in plan.ranks}) > 1:
        ranks = ", ".join(f"rank {rank} is {name} ({kinds[name]})" for rank, name in enumerate(plan.ranks))
        found[Feature.DEVICES] = f"ranks are of different types: {ranks}"
    return found


def _add_placement(plan: Plan, found: dict[Feature, str]) -> None:
    placement = plan.schedule.placement
    owners = [ranks[0] for ranks in placement]
    counts = {rank: owners.count(rank) for rank in dict.fromkeys(owners)}
    if max(counts.values()) == 1:
        return
    listed = ", ".join(f"rank {rank} has {count}" for rank, count in counts.items())
    found[Feature.STAGES_PER_RANK] = listed
    if len(set(counts.values())) > 1:
        found[Feature.UNEVEN_STAGES] = listed
    order = list(counts)
    if owners != [order[index % len(order)] for index in range(len(owners))]:
        found[Feature.PLACEMENT] = f"stages are on ranks {', '.join(map(str, owners))}"


def _add_replicas(plan: Plan, found: dict[Feature, str]) -> None:
    count = replicas_of(plan)
    if count == 1:
        return
    each = ", ".join(str(len(stage.accelerators)) for stage in plan.stages)
    if count is None:
        found[Feature.UNEVEN_REPLICAS] = f"stages have {each} replicas"
    elif one_pipeline(plan) is None:
        found[Feature.UNEVEN_REPLICAS] = (
            f"{plan.microbatches} micro-batches are dealt unevenly to {count} replicas of the pipeline"
        )
    else:
        found[Feature.REPLICAS] = f"{count} replicas of the pipeline"
