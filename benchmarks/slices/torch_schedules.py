"""torch's own schedules on the stages of our plan: the same cuts, micro-batches and updates.

On slices of one GPU they cannot run: gloo cannot send CUDA tensors and NCCL refuses two ranks on one GPU. A small
message is tried first, so that this is known before the model is built.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from torch import Tensor, nn

from bapipe.errors import BaPipeError
from bapipe.records.plan import Plan
from bapipe.torch.capturing import Stage, capture
from bapipe.torch.comm import Message
from bapipe.torch.comm.rank_agreement import gathered
from bapipe.torch.device.precision_modes import set_precision
from bapipe.torch.inputs.build_model import build_model
from bapipe.torch.inputs.make_optimizer import make_optimizer
from bapipe.torch.inputs.training_data import batches_for
from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.launch.train import peak_memory
from bapipe.torch.runtime.build_stages import OwnStages, check_model, own_stages
from bapipe.torch.runtime.plan_checks import check_plan

__all__ = ["train_torch"]


class _Stage(nn.Module):
    """Our stage as torch calls it: what comes from the stage before, then its own inputs by name."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *values: Tensor, **roots: Tensor) -> Any:
        made = self.stage(*values, *roots.values())
        return made[0] if self.stage.stage_spec.is_last else made


def train_torch(plan: Plan, name: str, *, steps: int, device: torch.device) -> dict[str, Any]:
    """Train by torch.distributed.pipelining's class `name`; every rank's peak memory and the steps' seconds."""
    rank, world = dist.get_rank(), dist.get_world_size()
    _try_message(device)
    settings = RunOptions()
    set_precision(plan.precision, device)
    built = build_model(plan.model, seed=settings.seed, precision=plan.dtype)
    if built.loss is not None:
        raise BaPipeError("torch's schedules run here on models that return their loss; profile it with_loss=true")
    captured = capture(built.module, built.args, built.kwargs, check=False)
    check_model(captured, plan)
    runnable = check_plan(plan)
    sizes = runnable.sizes
    own = own_stages(captured, plan, runnable.schedule, rank=rank, sizes=sizes, device=device)
    (stage,) = (by_size[sizes[0]] for by_size in own.stages.values())
    batches = batches_for(built, settings.data, global_batch=plan.global_batch, seed=settings.seed)
    first, last = rank == 0, rank == world - 1

    def roots(inputs: Any) -> list[Tensor]:
        leaves = own.inputs.leaves(inputs)
        return [leaves[root.index].to(device) for root in stage.stage_spec.roots]

    example = [leaf[: sizes[0]] for leaf in roots(batches(0)[0])]
    piece = pipelining.PipelineStage(
        _Stage(stage),
        rank,
        world,
        device,
        input_args=tuple(example) if first else _examples(own, rank - 1, sizes[0]),
        output_args=_loss_example() if last else _examples(own, rank, sizes[0]),
    )
    schedule = getattr(pipelining, name)(piece, len(sizes), loss_fn=_own_loss)
    optimizer = make_optimizer(plan.optimizer, list(stage.parameters()), rate=settings.learning_rate)
    seconds, losses = [], []
    for step in range(steps):
        inputs, _ = batches(step)
        given = roots(inputs)
        args = tuple(given) if first else ()
        named = {} if first else {f"root_{number}": value for number, value in enumerate(given)}
        told: list[Tensor] = []
        if last:
            named |= {"target": torch.zeros(plan.global_batch)}  # torch wants one
        for parameter in stage.parameters():
            parameter.grad = None
        _synchronize(device)
        dist.barrier()
        start = time.perf_counter()
        schedule.step(*args, losses=told if last else None, return_outputs=False, **named)
        if optimizer is not None:
            optimizer.step()
        _synchronize(device)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        losses.append(sum(float(loss) for loss in told) / len(sizes))
    known = gathered((peak_memory(device), losses))
    if rank != 0:
        return {}
    return {
        "schedule": f"torch {name}",
        "seconds": seconds,
        "losses": known[-1][1],
        "memory": [memory for memory, _ in known],
    }


def _try_message(device: torch.device) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    value = torch.zeros(2, device=device)
    operations = [dist.P2POp(dist.isend, value, rank + 1)] if rank + 1 < world else []
    operations += [dist.P2POp(dist.irecv, torch.zeros(2, device=device), rank - 1)] if rank else []
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    dist.barrier()


def _examples(own: OwnStages, boundary: int, size: int) -> tuple[Tensor, ...]:
    message: Message = own.messages[boundary, size]
    flags: Sequence[bool] = own.differentiable[boundary]
    return tuple(
        torch.empty(about.shape, dtype=about.dtype, device="meta", requires_grad=flag)
        for about, flag in zip(message, flags, strict=True)
    )


def _loss_example() -> tuple[Tensor, ...]:
    return (torch.empty((), device="meta", requires_grad=True),)


def _own_loss(output: Tensor, _: Tensor) -> Tensor:
    return output


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
