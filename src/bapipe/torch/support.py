"""What the runtime can run, checked before any process starts. Imports no torch."""

from __future__ import annotations

import os

from bapipe.errors import BaPipeError
from bapipe.plan import Plan
from bapipe.schedule.actions import Kind, Lane, Schedule
from bapipe.schedule.check import require_valid

__all__ = ["lane_of", "microbatch_sizes", "runnable_schedule", "stage_of", "threads_per_rank"]


def runnable_schedule(plan: Plan) -> Schedule:
    """The plan's schedule, if the runtime can run it.

    It runs one stage per rank with one lane each, of forwards and backwards over a chain of whole layers, and
    updates once all backwards are done. Whatever else is refused here; so is an order that would wait for ever.
    """
    if plan.model.ref is None:
        raise BaPipeError(
            f"the plan of {plan.model.name} names no code to run; "
            "set model.ref of its profile to package.module:function and plan again"
        )
    schedule = plan.schedule.to_schedule()
    if not schedule.flushes:
        raise BaPipeError(f"{schedule.name} updates while it runs, which cannot be run yet; plan with 1f1b-so")
    for index, (stage, ranks) in enumerate(zip(plan.stages, schedule.placement, strict=True)):
        if len(ranks) != 1 or len(stage.accelerators) != 1:
            raise BaPipeError(f"stage {index} has replicas, which cannot be run yet; plan without --replicas")
        if stage.fractions or stage.recompute:
            what = "parts of layers" if stage.fractions else "recomputation"
            raise BaPipeError(f"stage {index} has {what}, which cannot be run yet; plan without")
    for rank in range(schedule.num_ranks):
        _check_lanes(schedule, rank)
    _check_layers(plan)
    microbatch_sizes(plan)
    require_valid(schedule)
    return schedule


def _check_lanes(schedule: Schedule, rank: int) -> None:
    lanes = [lane for lane in schedule.lanes if lane.rank == rank]
    stages = schedule.stages_of(rank)
    if len(lanes) != 1 or len(stages) != 1:
        raise BaPipeError(
            f"rank {rank} has {len(stages)} stages on {len(lanes)} lanes, which cannot be run yet; "
            "plan with 1f1b-sno, 1f1b-so, 1f1b or gpipe"
        )
    actions = list(lanes[0])
    for position, action in enumerate(actions):
        if action.kind == Kind.U and position + 1 < len(actions):
            raise BaPipeError(f"rank {rank}: {action} is not its last action, which cannot be run yet; move it")
        if action.kind not in (Kind.F, Kind.B, Kind.U):
            raise BaPipeError(
                f"rank {rank}: action {action} cannot be run yet; plan with 1f1b-sno, 1f1b-so, 1f1b or gpipe"
            )


def _check_layers(plan: Plan) -> None:
    expected = 0
    for index, stage in enumerate(plan.stages):
        count = stage.last_layer - stage.first_layer + 1
        if stage.first_layer != expected or count < 1 or len(stage.layers) != count:
            raise BaPipeError(
                f"stage {index} has layers {stage.first_layer} to {stage.last_layer} and "
                f"{len(stage.layers)} names where layer {expected} is next; plan again"
            )
        expected = stage.last_layer + 1


def microbatch_sizes(plan: Plan) -> tuple[int, ...]:
    """Samples of each micro-batch; the last one may be short."""
    count, size = plan.microbatches, plan.microbatch_size
    if count != plan.schedule.microbatches:
        raise BaPipeError(
            f"the plan has {count} micro-batches but its schedule {plan.schedule.microbatches}; plan again"
        )
    last = plan.minibatch - (count - 1) * size
    if not 1 <= last <= size:
        raise BaPipeError(
            f"{count} micro-batches of {size} cannot hold a mini-batch of {plan.minibatch} samples; plan again"
        )
    return (*[size] * (count - 1), last)


def lane_of(schedule: Schedule, rank: int) -> Lane:
    """The one lane of a rank."""
    return next(lane for lane in schedule.lanes if lane.rank == rank)


def stage_of(schedule: Schedule, rank: int) -> int:
    """The one stage of a rank."""
    return schedule.stages_of(rank)[0]


def threads_per_rank(ranks: int) -> int:
    """An equal part of this machine's cores for each of its ranks, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)
