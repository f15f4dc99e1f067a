"""torch's own schedules on the stages of our plan: the same cuts, micro-batches and updates.

What runs is the class that torch.distributed.pipelining ships, in its own order, on our captured stages as
modules; backwards and messages are torch's. Without NCCL they cannot run on slices of one GPU: gloo cannot send
CUDA tensors. A small message is tried first, so that this is known before the model is built.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.pipelining as pipelining
from torch import Tensor
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from bapipe.errors import BaPipeError
from bapipe.records.plan import Plan
from bapipe.torch.capturing import Captured, Stage, capture
from bapipe.torch.comm.rank_agreement import gathered
from bapipe.torch.device.precision_modes import set_precision
from bapipe.torch.inputs.build_model import build_model
from bapipe.torch.inputs.make_optimizer import make_optimizer
from bapipe.torch.inputs.training_data import Batches, batches_for
from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.launch.train import peak_memory
from bapipe.torch.runtime.build_stages import OwnStages, check_model, own_stages, stage_parameters
from bapipe.torch.runtime.gradient_sync import make_sums
from bapipe.torch.runtime.microbatches import split_inputs
from bapipe.torch.runtime.pipelining_internals import ComputedStage, TorchStage
from bapipe.torch.runtime.plan_checks import check_plan

__all__ = ["SPLIT", "TorchSchedule", "timed_steps", "train_torch"]

SPLIT = ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV")
"""classes whose backwards are done in two parts; torch refuses compiled stages under them"""


class TorchSchedule:
    """One rank of a class of torch.distributed.pipelining that trains a captured model by the stages of a plan."""

    def __init__(
        self, captured: Captured, plan: Plan, name: str, *, device: torch.device, compiled: bool = False
    ) -> None:
        """`compiled`: each stage is compiled as a whole by torch.compile, as a user of torch would."""
        if compiled and name in SPLIT:
            raise BaPipeError(f"{name} refuses compiled stages; run it without")
        if plan.precision.autocast is not None:
            raise BaPipeError("torch's stages send dtypes as captured, which autocast changes; use bf16 or fp32")
        check_model(captured, plan)
        runnable, rank = check_plan(plan), dist.get_rank()
        self._sizes, self._device, last = runnable.sizes, device, len(plan.stages) - 1
        if len(set(self._sizes)) > 1:
            raise BaPipeError("torch's schedules have micro-batches of one size; change the global batch")
        placement = [list(runnable.schedule.placement[index]) for index in range(last + 1)]
        if any(len(ranks) > 1 for ranks in placement):
            raise BaPipeError("torch's schedules have no replicas of a stage; plan with --stages")
        own = own_stages(captured, plan, runnable.schedule, rank=rank, sizes=self._sizes, device=device)
        self._own, self._roots = own, list[Mapping[int, Any]]()
        modules = {index: by_size[self._sizes[0]] for index, by_size in own.stages.items()}
        pieces = [
            TorchStage(
                ComputedStage(module, self._computing(module, compiled), split=name in SPLIT and index > 0),
                index=index,
                count=last + 1,
                device=device,
                inputs=() if index == 0 else _examples(own, index - 1, self._sizes[0]),
                outputs=_loss_example() if index == last else _examples(own, index, self._sizes[0]),
                group=None,
                watch=_unwatched,
            )
            for index, module in sorted(modules.items())
        ]
        self._is_last = last in modules
        kind = getattr(pipelining, name)
        single = issubclass(kind, PipelineScheduleSingle)
        self._schedule = kind(pieces[0] if single else pieces, len(self._sizes), loss_fn=_own_loss)
        held = {index: dict(module.named_parameters()) for index, module in modules.items()}
        patience = datetime.timedelta(seconds=RunOptions().timeout)
        _, self._tied = make_sums(
            placement,
            stage_parameters(captured, plan),
            held,
            lambda ranks: dist.new_group(list(ranks), timeout=patience),
        )
        self.parameters = list({id(item): item for own in held.values() for item in own.values()}.values())
        """what an optimizer steps"""

    def _computing(self, module: Stage, compiled: bool) -> Callable[[int, tuple[Tensor, ...]], tuple[Tensor, ...]]:
        call = torch.compile(module) if compiled else module
        spec = module.stage_spec

        def compute(microbatch: int, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            made = call(*received, *(self._roots[microbatch][root.index] for root in spec.roots))
            if not spec.is_last:
                return tuple(made)
            return (_scalar(self._own.output(made[:-1] if spec.counts_loss else made)),)

        return compute

    def put(self, inputs: Any) -> None:
        """The global batch that is trained next, on this rank's device."""
        needed = set(self._own.needed)
        parts = split_inputs(self._own.inputs, inputs, self._sizes, needed=needed)
        self._roots = [
            {index: _on(leaf, self._device) for index, leaf in enumerate(leaves) if index in needed}
            for leaves in parts
        ]

    def step(self) -> Tensor:
        """Gradients of one global batch into the parameters; the loss, where the last stage is, else 0."""
        told: list[Tensor] = []
        named: dict[str, Any] = {"target": torch.zeros(len(self._sizes)), "losses": told} if self._is_last else {}
        self._schedule.step(return_outputs=False, **named)
        self._tied.start()
        self._tied.finish()
        return torch.stack([loss.detach() for loss in told]).mean() if told else torch.zeros(())


def timed_steps(
    put: Callable[[Any], None],
    step: Callable[[], Tensor],
    optimizer: torch.optim.Optimizer | None,
    batches: Batches,
    steps: int,
    device: torch.device,
) -> dict[str, Any]:
    """Steps of a peer, each from a barrier to a barrier with the optimizer step; all ranks, what rank 0 returns.

    `step` returns the loss, or this rank's share of it.
    """
    seconds, losses = [], []
    for number in range(steps):
        put(batches(number)[0])
        if optimizer is not None:
            optimizer.zero_grad(set_to_none=True)
        _synchronize(device)
        dist.barrier()
        start = time.perf_counter()
        loss = step()
        if optimizer is not None:
            optimizer.step()
        _synchronize(device)
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss))
    known = gathered((peak_memory(device), losses))
    if dist.get_rank() != 0:
        return {}
    return {
        "seconds": seconds,
        "losses": [sum(parts) for parts in zip(*(own for _, own in known), strict=True)],
        "memory": [memory for memory, _ in known],
    }


def train_torch(plan: Plan, name: str, *, steps: int, device: torch.device) -> dict[str, Any]:
    """Train by torch.distributed.pipelining's class `name`; every rank's peak memory and the steps' seconds."""
    _try_message(device)
    settings = RunOptions()
    set_precision(plan.precision, device)
    built = build_model(plan.model, seed=settings.seed, precision=plan.dtype)
    if built.loss is not None:
        raise BaPipeError("torch's schedules run here on models that return their loss; profile it with_loss=true")
    captured = capture(built.module, built.args, built.kwargs, check=False)
    trained = TorchSchedule(captured, plan, name, device=device)
    batches = batches_for(built, settings.data, global_batch=plan.global_batch, seed=settings.seed)
    optimizer = make_optimizer(plan.optimizer, trained.parameters, rate=settings.learning_rate)
    told = timed_steps(trained.put, trained.step, optimizer, batches, steps, device)
    return {"schedule": f"torch {name}", **told} if told else {}


def _try_message(device: torch.device) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    value = torch.zeros(2, device=device)
    operations = [dist.P2POp(dist.isend, value, rank + 1)] if rank + 1 < world else []
    operations += [dist.P2POp(dist.irecv, torch.zeros(2, device=device), rank - 1)] if rank else []
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    dist.barrier()


def _examples(own: OwnStages, boundary: int, size: int) -> tuple[Tensor, ...]:
    flags: Sequence[bool] = own.differentiable[boundary]
    return tuple(
        torch.empty(about.shape, dtype=about.dtype, device="meta", requires_grad=flag)
        for about, flag in zip(own.messages[boundary, size], flags, strict=True)
    )


def _loss_example() -> tuple[Tensor, ...]:
    return (torch.empty((), device="meta", requires_grad=True),)


def _own_loss(output: Tensor | tuple[Tensor, ...], _: Tensor) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _scalar(output: Any) -> Tensor:
    """The loss that a model returns, by itself or in an output of transformers."""
    found = output if isinstance(output, Tensor) else output["loss"]
    assert isinstance(found, Tensor)
    return found


def _unwatched(*_: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _on(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device) if isinstance(leaf, Tensor) else leaf


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
