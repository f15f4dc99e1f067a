"""Whether the parts of a plan fit each other: what every reader of a plan may rely on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import require_node_name
from bapipe.hardware.precision import find_precision
from bapipe.io.amounts import require_amounts
from bapipe.schedule.actions import Kind, Schedule
from bapipe.schedule.validate import require_valid

if TYPE_CHECKING:
    from bapipe.records.plan import Plan, PlanStage

__all__ = ["microbatch_sizes", "require_consistent"]


def require_consistent(plan: Plan) -> Schedule:
    """The plan's order, if the plan's parts fit each other; a BaPipeError that names what does not.

    Stages follow one another through the layers, each runs on the ranks that the order gives it, and a rank is one
    accelerator; micro-batches make up the global batch; the order has every action once and on its rank; no amount
    is negative. Whether the order deadlocks is left to what simulates or runs it. Linear in the actions, two
    microseconds each.
    """
    find_precision(plan.dtype)
    for accelerator in plan.cluster.accelerators:
        require_node_name(accelerator.node, where=f"accelerator '{accelerator.name[:60]}'")
    for index, stage in enumerate(plan.stages):
        require_amounts(stage, where=f"stage {index}", todo="plan again")
        if stage.memory_parts is not None:
            require_amounts(stage.memory_parts, where=f"stage {index}: memory_parts", todo="plan again")
        for replica in stage.replicas or ():
            require_amounts(replica, where=f"stage {index}: replicas", todo="plan again")
    require_amounts(plan.prediction, where="prediction", todo="plan again", signed=("gap", "bubble"))
    for alternative in plan.alternatives:
        where = f"alternative '{alternative.name[:60]}'"
        require_amounts(alternative, where=where, todo="plan again")
    _require_boards(plan)
    microbatch_sizes(plan)
    _require_layers(plan)
    schedule = plan.schedule.to_schedule()
    _require_ranks(plan, schedule)
    _require_replicas(plan, schedule)
    _require_recomputation(plan, schedule)
    if not _complete(schedule):
        require_valid(schedule)  # says where
    return schedule


def _require_boards(plan: Plan) -> None:
    """What is built on FPGAs is built on the plan's own, in the order of its stages."""
    if plan.deployment is None:
        return
    boards = plan.deployment.boards
    if tuple(board.accelerator for board in boards) != plan.ranks:
        raise BaPipeError(f"the deployment has {len(boards)} boards, which are not the stages'; plan again")
    for board in boards:
        where = f"board '{board.accelerator[:60]}'"
        for part in (board, *board.modules, *board.placed, *board.fifos, *board.links):
            require_amounts(part, where=where, todo="plan again")
        if not board.dsp_installed:
            raise BaPipeError(f"{where} has no DSPs; plan again")
        silent = next((use for use in board.links if not use.bandwidth), None)
        if silent is not None:
            raise BaPipeError(f"{where} sends to '{silent.to[:60]}' over a link of 0 bytes/s; plan again")


def microbatch_sizes(plan: Plan) -> tuple[int, ...]:
    """Samples of each micro-batch; the last one may be short."""
    count, size = plan.microbatches, plan.microbatch_size
    if count != plan.schedule.microbatches:
        raise BaPipeError(
            f"the plan has {count} micro-batches but its schedule {plan.schedule.microbatches}; plan again"
        )
    last = plan.global_batch - (count - 1) * size
    if count < 1 or not 1 <= last <= size:
        raise BaPipeError(
            f"{count} micro-batches of {size} cannot hold a global batch of {plan.global_batch} samples; "
            "plan again"
        )
    return (*[size] * (count - 1), last)


def _require_layers(plan: Plan) -> None:
    """Stages follow one another, and only a layer that is split between them is in both."""
    expected, done = 0, 0
    """the layer that is next, and how much of it stages before have"""
    for index, stage in enumerate(plan.stages):
        count = stage.last_layer - stage.first_layer + 1
        if stage.first_layer != expected or count < 1 or len(stage.layers) != count:
            raise BaPipeError(
                f"stage {index} has layers {stage.first_layer} to {stage.last_layer} and "
                f"{len(stage.layers)} names where layer {expected} is next; plan again"
            )
        done = _require_parts(index, stage, done)
        expected = stage.last_layer + (0 if done else 1)
    if done:
        raise BaPipeError(f"no stage has the rest of layer {expected}, from {done} on; plan again")


def _require_parts(index: int, stage: PlanStage, done: int) -> int:
    """Channels of the stage's last layer that it and those before have; 0 where that layer is complete."""
    ends = {stage.first_layer: done, stage.last_layer: done if stage.first_layer == stage.last_layer else 0}
    left = 0
    seen = set()
    for part in stage.fractions:
        fits = part.layer in ends and part.layer not in seen and 0 <= part.start < part.stop <= part.of
        inside = part.layer == stage.last_layer or part.stop == part.of
        if not fits or part.start != ends[part.layer] or not inside:
            raise BaPipeError(
                f"stage {index} has channels {part.start} to {part.stop} of {part.of} of layer {part.layer}, "
                "which does not go on from the stage before; plan again"
            )
        seen.add(part.layer)
        if part.layer == stage.last_layer and part.stop < part.of:
            left = part.stop
    if done and stage.first_layer not in seen:
        raise BaPipeError(
            f"stage {index} has all of layer {stage.first_layer}, of which the stage before has a part; plan again"
        )
    return left


def _require_ranks(plan: Plan, schedule: Schedule) -> None:
    """Every stage has as many accelerators as ranks, and a rank is the same accelerator at all its stages."""
    names = plan.ranks
    for index, (stage, ranks) in enumerate(zip(plan.stages, schedule.placement, strict=True)):
        if len(ranks) != len(stage.accelerators):
            raise BaPipeError(
                f"stage {index} has {len(stage.accelerators)} accelerators but {len(ranks)} ranks; plan again"
            )
        for name, rank in zip(stage.accelerators, ranks, strict=True):
            if rank >= len(names) or names[rank] != name:
                other = names[rank] if rank < len(names) else "none"
                raise BaPipeError(
                    f"stage {index} runs on '{name[:60]}' by its rank {rank}, which is {other[:60]}; plan again"
                )


def _require_replicas(plan: Plan, schedule: Schedule) -> None:
    """Where replicas have figures of their own, all are there, with the micro-batches that the order deals."""
    for index, stage in enumerate(plan.stages):
        dealt = schedule.microbatch_counts(index)
        if stage.replicas is not None and tuple(own.microbatches for own in stage.replicas) != dealt:
            said = "-".join(str(own.microbatches) for own in stage.replicas[:16]) or "none"
            raise BaPipeError(
                f"stage {index} says that its replicas take {said} micro-batches, but its order deals "
                f"{'-'.join(map(str, dealt[:16]))}; plan again"
            )


def _require_recomputation(plan: Plan, schedule: Schedule) -> None:
    for index, stage in enumerate(plan.stages):
        again = any(((lane.kinds == Kind.R) & (lane.stages == index)).any() for lane in schedule.lanes)
        if again != stage.recompute:
            said, order = ("recomputes", "no R") if stage.recompute else ("does not recompute", "R all the same")
            raise BaPipeError(f"the plan says that stage {index} {said}, but its order has {order}; plan again")
        _require_layer_runs(index, stage)


def _require_layer_runs(index: int, stage: PlanStage) -> None:
    """Runs of layers that recompute lie in their stage, one after another, and hold no layer in part."""
    if stage.recompute and stage.recompute_layers:
        raise BaPipeError(f"stage {index} recomputes as a whole and by layers; plan again")
    parts, before = {part.layer for part in stage.fractions}, stage.first_layer - 1
    for run in stage.recompute_layers:
        if not before < run.first <= run.last <= stage.last_layer:
            raise BaPipeError(
                f"stage {index} says that layers {run.first} to {run.last} recompute, which are not its own or "
                f"not in order, of {stage.first_layer} to {stage.last_layer}; plan again"
            )
        if parts & set(range(run.first, run.last + 1)):
            raise BaPipeError(f"stage {index} recomputes a layer of which it has a part; plan again")
        before = run.last


def _complete(schedule: Schedule) -> bool:
    """Whether every micro-batch has its forward and its backward, whole or in two parts, once and on its rank."""
    N, M = schedule.num_stages, schedule.num_microbatches
    kinds, stages, microbatches = (
        np.concatenate([np.zeros(0, dtype=np.int64), *(getattr(lane, name) for lane in schedule.lanes)])
        for name in ("kinds", "stages", "microbatches")
    )
    ranks = np.repeat([lane.rank for lane in schedule.lanes], [len(lane) for lane in schedule.lanes])
    whole = microbatches < 0
    owners = np.stack([schedule.ranks_by_microbatch(stage) for stage in range(N)])
    if (owners[stages[~whole], microbatches[~whole]] != ranks[~whole]).any():
        return False
    if any(rank not in schedule.placement[stage] for stage, rank in zip(stages[whole], ranks[whole], strict=True)):
        return False
    counts = np.zeros((len(Kind), N, M), dtype=np.int64)
    np.add.at(counts, (kinds[~whole], stages[~whole], microbatches[~whole]), 1)
    steps = np.stack([kinds[whole], stages[whole], ranks[whole]])
    if np.unique(steps, axis=1).shape[1] != steps.shape[1]:
        return False
    parts = (counts[Kind.I] == 1) & (counts[Kind.W] == 1) & (counts[Kind.B] == 0)
    full = (counts[Kind.B] == 1) & (counts[Kind.I] == 0) & (counts[Kind.W] == 0)
    return bool((counts[Kind.F] == 1).all() and (parts | full).all() and (counts[Kind.R] <= 1).all())
