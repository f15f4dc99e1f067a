"""What the runtime can run: the one place where a plan is checked, before any process starts. Imports no torch.

`bapipe run` checks in the launcher, and its ranks trust that; a `Pipeline` that is given a plan or its file, and a
rank that no launcher started, check it themselves, once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from bapipe.costs.optimizers import is_elementwise
from bapipe.errors import BaPipeError
from bapipe.hardware.cpu_types import cpu_threads
from bapipe.hardware.precision import Precision
from bapipe.records.plan import Plan, read_plan
from bapipe.records.plan_consistency import microbatch_sizes, require_consistent
from bapipe.schedule.actions import Kind, Lane, Schedule
from bapipe.schedule.generators import capped
from bapipe.schedule.validate import require_valid

__all__ = [
    "RunnablePlan",
    "as_runnable",
    "check_engine",
    "check_plan",
    "check_precision",
    "check_sharding",
    "compute_lane",
    "describe_need",
    "missing_gpus",
    "ranks_on_gpus",
    "threads_of",
    "threads_per_rank",
    "trusted_plan",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnablePlan:
    """A plan that has been checked, here or by the launcher, with what every rank reads from it."""

    plan: Plan
    """as it was read"""
    schedule: Schedule
    """the plan's order"""
    sizes: tuple[int, ...]
    """samples of each micro-batch"""

    def stages_by_rank(self) -> tuple[tuple[int, ...], ...]:
        """The (virtual) stages of every rank."""
        return tuple(tuple(self.schedule.stages_of(rank)) for rank in range(self.schedule.num_ranks))


def trusted_plan(plan: Plan) -> RunnablePlan:
    """A plan that `check_plan` has accepted in another process."""
    return RunnablePlan(plan=plan, schedule=plan.schedule.to_schedule(), sizes=microbatch_sizes(plan))


def as_runnable(plan: Plan | RunnablePlan | str | Path, *, flushes: bool) -> RunnablePlan:
    """A plan or its file, checked; one that has been checked as it is. `flushes` says which kind is wanted."""
    if isinstance(plan, (str, Path)):
        plan = read_plan(plan)
    runnable = check_plan(plan) if isinstance(plan, Plan) else plan
    schedule = runnable.schedule
    if flushes != schedule.flushes:
        raise BaPipeError(
            f"{schedule.name} waits for every global batch to end; train it with Pipeline, or plan with pipedream"
            if schedule.flushes
            else f"{schedule.name} updates while it runs; train it with PipeDream, or plan with 1f1b-so"
        )
    return runnable


def check_plan(plan: Plan) -> RunnablePlan:
    """The plan, if the runtime can run it; BaPipeError otherwise.

    It runs forwards, backwards (whole, or split into input and weight gradients) and activation checkpointing in
    one lane per rank over a chain of layers, several stages on a rank and several replicas of a stage if there
    are, with the optimizer step once all gradients are there; and PipeDream's order, which takes optimizer steps
    while it runs. Whatever else is refused here; so is an order that would deadlock.
    """
    if plan.model.ref is None:
        raise BaPipeError(
            f"the plan of {plan.model.name} names no code to run; "
            "set model.ref of its profile to package.module:function and plan again"
        )
    schedule = require_consistent(plan)
    for rank in range(schedule.num_ranks):
        _check_lanes(schedule, rank)
    _check_parts(plan)
    sizes = microbatch_sizes(plan)
    require_valid(schedule, sends="windowed")
    check_sharding(plan, schedule)
    check_engine(plan)
    if not schedule.flushes:
        _check_endless(schedule)
    check_precision(schedule, plan.precision)
    return RunnablePlan(plan=plan, schedule=schedule, sizes=sizes)


def check_sharding(plan: Plan, schedule: Schedule) -> None:
    """Refuse ZeRO-1 where no replicas wait for each other, and other stages of ZeRO."""
    if plan.zero_stage not in (0, 1):
        raise BaPipeError(f"zero_stage is 0 or 1, got {plan.zero_stage}; plan again, or use --strategy fsdp")
    if plan.zero_stage and not schedule.flushes:
        raise BaPipeError(
            f"{schedule.name} has no replicas that could share optimizer states (ZeRO-1); plan with --zero-stage 0"
        )
    if plan.zero_stage and is_elementwise(plan.optimizer) is False:
        raise BaPipeError(
            f"{plan.optimizer[:60]} looks at more than one element of a weight at a time, so that its state "
            "cannot be sharded (ZeRO-1); plan with --zero-stage 0"
        )


def check_engine(plan: Plan) -> None:
    """Refuse what torch's DDP and FSDP2 do not do as the plan has it."""
    if plan.engine == "bapipe":
        return
    if len(plan.stages) != 1 or plan.schedule.name != "data-parallel" or plan.zero_stage:
        raise BaPipeError(f"{plan.engine} runs the whole model on every rank; plan with --strategy {plan.engine}")
    if plan.precision.scaled:
        raise BaPipeError(f"{plan.engine} runs no {plan.dtype} here; plan with --precision bf16-mixed")
    if plan.compiled:
        raise BaPipeError(f"{plan.engine} runs layers as they are; plan without --compile")
    if plan.engine == "fsdp" and is_elementwise(plan.optimizer) is False:
        raise BaPipeError(
            f"{plan.optimizer[:60]} looks at more than one element of a weight at a time, which fsdp shards; plan "
            "with --strategy ddp"
        )


def check_precision(schedule: Schedule, precision: Precision) -> None:
    """Refuse mixed precision where weights change within what autocast keeps their casts for."""
    if not schedule.flushes and precision.autocast is not None:
        raise BaPipeError(
            f"{schedule.name} changes the weights after every micro-batch, and {precision.word} casts them once "
            f"for all; plan with --precision {precision.weights} or {precision.activations}, or with 1f1b-so"
        )


def _check_endless(schedule: Schedule) -> None:
    """An order that goes on for ever is known by its caps alone: 1F1B on straight stages."""
    N, M = schedule.num_stages, schedule.num_microbatches
    if schedule.placement != tuple((rank,) for rank in range(N)):
        raise BaPipeError(
            f"{schedule.name} runs one stage on each rank without replicas; plan with --schedule pipedream"
        )
    if schedule.caps is None or schedule.lanes != capped(N, M, schedule.caps).lanes:
        raise BaPipeError(
            f"{schedule.name} never flushes, which can be run in 1F1B's order only; plan with --schedule pipedream"
        )


def _check_lanes(schedule: Schedule, rank: int) -> None:
    computing = [lane for lane in schedule.lanes if lane.rank == rank and lane.name != "all-reduce"]
    if len(computing) != 1:
        raise BaPipeError(
            f"rank {rank} computes on {len(computing)} lanes at once, which only an FPGA does; "
            "plan with 1f1b-sno, 1f1b-so, 1f1b or gpipe"
        )
    updated = False
    for action in computing[0]:
        if updated and action.kind != Kind.U:
            raise BaPipeError(f"rank {rank}: {action} follows an update, which cannot be run yet; move it")
        updated = action.kind == Kind.U
        if action.kind == Kind.A:
            raise BaPipeError(f"rank {rank}: {action} belongs on the all-reduce lane; move it there")


def _check_parts(plan: Plan) -> None:
    """A rank has one part of a layer that is split between stages, not two."""
    parts: dict[tuple[int, str], int] = {}
    """a layer and the accelerator that has a part of it -> for which stage"""
    for index, stage in enumerate(plan.stages):
        for layer, name in ((part.layer, name) for part in stage.fractions for name in stage.accelerators):
            if (layer, name) in parts:
                raise BaPipeError(
                    f"stages {parts[layer, name]} and {index} are both on {name} and both have a part of layer "
                    f"{layer}; cut it so that a rank has one part"
                )
            parts[layer, name] = index


def compute_lane(schedule: Schedule, rank: int) -> Lane:
    """The lane of a rank that computes; it may have another for the all-reduce."""
    return next(lane for lane in schedule.lanes if lane.rank == rank and lane.name != "all-reduce")


def ranks_on_gpus(plan: Plan, device: str | None) -> list[int]:
    """The ranks that will ask torch for a GPU: all or none by the `device` that is given, else as planned."""
    if device is not None:
        return list(range(len(plan.ranks))) if device.startswith("cuda") else []
    kinds = {item.name: plan.cluster.types[item.type].kind for item in plan.cluster.accelerators}
    return [rank for rank, name in enumerate(plan.ranks) if kinds[name] == "gpu"]


def describe_need(plan: Plan, device: str | None) -> str:
    """Why a run needs a GPU, to begin a complaint with."""
    if device is not None:
        return f"--device {device} needs a GPU"
    types = {item.name: item.type for item in plan.cluster.accelerators}
    ranks = ranks_on_gpus(plan, device)
    names = ", ".join(dict.fromkeys(types[plan.ranks[rank]][:40] for rank in ranks[:4]))
    return f"the plan has {len(ranks)} of {len(plan.ranks)} ranks on GPUs ({names})"


def missing_gpus(need: str, version: str, *, built: bool) -> BaPipeError:
    """That torch has no GPU to offer; `built` says whether it could use one."""
    found = "sees none" if built else "is built without CUDA"
    return BaPipeError(f"{need}, but torch {version} here {found}; give --device cpu, or run it where GPUs are")


def threads_of(plan: Plan) -> int:
    """Threads of a rank: as many as its CPU type was profiled with, else an equal part of this machine's cores."""
    kinds = {item.type for item in plan.cluster.accelerators if item.name in plan.ranks}
    named = {cpu_threads(name) for name in kinds}
    if len(named) == 1 and (threads := named.pop()) is not None:
        return threads
    return threads_per_rank(int(os.environ.get("LOCAL_WORLD_SIZE", len(plan.ranks))))


def threads_per_rank(ranks: int) -> int:
    """An equal part of this machine's cores for each of its ranks, at least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)
