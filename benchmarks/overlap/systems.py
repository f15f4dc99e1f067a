"""BaPipe's executor and torch's schedules, each as a function that trains one mini-batch of the same stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed.pipelining as pipelining
from stages import Case, loss
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from bapipe.schedule.generators import make_schedule
from bapipe.torch.capturing import Stage
from bapipe.torch.capturing.crossing_values import Value
from bapipe.torch.capturing.stage_module import Root, StageSpec
from bapipe.torch.comm import GlooTransport, TensorShape
from bapipe.torch.runtime.action_clock import HostActionClock
from bapipe.torch.runtime.executor import Executor
from bapipe.torch.stage.loss import LossSum
from bapipe.torch.stage.runner import StageRunner

__all__ = ["Step", "alone", "bapipe_step", "step_of", "torch_step"]

_PAUSE = 0.0003
"""seconds"""

Step = Callable[[], None]


def step_of(system: str, case: Case, module: nn.Module, *, rank: int, world: int) -> Step:
    """A system by its name: "bapipe 1f1b-so", "bapipe 1f1b 3,1" (with caps), "torch ScheduleGPipe", "alone"."""
    owner, _, name = system.partition(" ")
    if owner == "alone":
        return alone(case, module, last=rank == world - 1)
    make = bapipe_step if owner == "bapipe" else torch_step
    return make(name, case, module, rank=rank, world=world)


def _data(case: Case) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(case.microbatches, case.floats, generator=generator)
    return inputs, torch.randn(case.microbatches, 1, generator=generator)


def bapipe_step(name: str, case: Case, module: nn.Module, *, rank: int, world: int) -> Step:
    """The executor as `Pipeline` makes it, on a stage made by hand."""
    count = case.microbatches
    sizes = [1] * count
    first, last = rank == 0, rank == world - 1
    name, _, caps = name.partition(" ")
    schedule = make_schedule(name, world, count, caps=[int(cap) for cap in caps.split(",")] if caps else None)
    losses = LossSum(loss, sizes)
    runner = StageRunner(
        rank,
        {1: _stage(case, module, rank=rank, first=first, last=last)},
        sizes=sizes,
        parted=rank in schedule.parted_stages(),
        loss=losses if last else None,
        output=_only if last else None,
    )
    message = (TensorShape(shape=(1, case.floats), dtype=torch.float32),)
    executor = Executor(
        rank,
        schedule,
        {rank: runner},
        GlooTransport(),
        messages=lambda boundary, microbatch, onward: message,  # noqa: ARG005
        reducers={},
        clock=HostActionClock(),
    )
    inputs, targets = _data(case)
    number = 0

    def step() -> None:
        nonlocal number
        leaves = [(part,) for part in inputs.split(1)] if first else []
        parts = targets.split(1) if last else ()
        losses.begin()
        executor.run(number, inputs=leaves, targets=parts)
        number += 1

    return step


def _stage(case: Case, module: nn.Module, *, rank: int, first: bool, last: bool) -> Stage:
    value = Value(name="value", dims=((1, 0), (0, case.floats)), dtype=torch.float32, requires_grad=True)
    spec = StageSpec(
        first=rank,
        last=rank,
        received=() if first else (value,),
        roots=(Root(index=0, name="value"),) if first else (),
        sent=() if last else (value,),
        is_last=last,
        recomputed=(),
        random=(),
        whole=("module",),
    )
    stage = Stage(spec, lambda stage, position, value: (stage.module(value),), "")  # noqa: ARG005
    stage.add_module("module", module)
    return stage


def _only(leaves: Sequence[Any]) -> Any:
    return leaves[0]


def torch_step(name: str, case: Case, module: nn.Module, *, rank: int, world: int) -> Step:
    """A schedule that torch ships, as its documentation says to use it."""
    example = torch.zeros(1, case.floats)
    made = example.clone().requires_grad_()
    stage = pipelining.PipelineStage(
        module,
        rank,
        world,
        torch.device("cpu"),
        input_args=(example if rank == 0 else example.clone().requires_grad_(),),
        output_args=(made,),
    )
    kind = getattr(pipelining, name)
    held = stage if issubclass(kind, PipelineScheduleSingle) else [stage]
    schedule = kind(held, case.microbatches, loss_fn=loss)
    inputs, targets = _data(case)
    args = (inputs,) if rank == 0 else ()
    kwargs = {"target": targets} if rank == world - 1 else {}

    def step() -> None:
        # Every micro-batch's output on the last stage, put together, is of no use here.
        schedule.step(*args, return_outputs=False, **kwargs)

    return step


def alone(case: Case, module: nn.Module, *, last: bool) -> Step:
    """Forward and backward of every micro-batch and nothing else: what no runtime can go below.

    Before each there is a short sleep, because every rank waits for its input, and code that has waited finds the
    processor's caches cold.
    """
    inputs, targets = _data(case)
    parts = [part.requires_grad_() for part in inputs.split(1)]
    error = torch.ones(1, case.floats)

    def step() -> None:
        for part, target in zip(parts, targets.split(1), strict=True):
            time.sleep(_PAUSE)
            made = module(part)
            if last:
                made = loss(made, target)
            time.sleep(_PAUSE)
            torch.autograd.backward([made], None if last else [error])
            part.grad = None

    return step
