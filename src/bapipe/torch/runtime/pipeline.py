"""`Pipeline`: a plan, trained step by step from the user's own loop; every rank makes one.

pipe = Pipeline(build_model, plan="plan.json", loss_fn=loss_fn)
optimizer = torch.optim.AdamW(pipe.parameters())
for inputs, targets in loader:
    loss = pipe.step(inputs, targets)
    pipe.clip_grad_norm_(1.0)
    optimizer.step(); optimizer.zero_grad()
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bapipe.errors import BaPipeError
from bapipe.records.plan import Plan
from bapipe.schedule.actions import Action
from bapipe.torch.capturing import Captured
from bapipe.torch.capturing.stage_module import Slice
from bapipe.torch.comm import guarded
from bapipe.torch.comm.choose_transport import make_transport
from bapipe.torch.device.allocator import keep_in_pages
from bapipe.torch.health.watchdog import Watch
from bapipe.torch.runtime.action_clock import clock_for
from bapipe.torch.runtime.build_stages import (
    Build,
    materialise_stages,
    other_names,
    own_stages,
    planned_model,
    stage_parameters,
    unused_state,
)
from bapipe.torch.runtime.executor import Executor, RankTrace
from bapipe.torch.runtime.gradient_sync import Reducer, TiedWeights, make_sums
from bapipe.torch.runtime.microbatches import split_inputs, split_targets
from bapipe.torch.runtime.pipeline_options import PipelineOptions
from bapipe.torch.runtime.plan_checks import RunnablePlan, as_runnable
from bapipe.torch.runtime.process_group import device_of, join
from bapipe.torch.stage.loss import LossFunction, LossSum, LossTotals
from bapipe.torch.stage.loss_weighing import Weighing
from bapipe.torch.stage.runner import StageRunner

__all__ = ["Build", "Pipeline"]


class Pipeline:
    """This rank's part of a model that is trained by a plan.

    Made on every rank of a `torchrun` at once. The model is built by `build_model()`, which returns (module, args,
    kwargs) with an example of its inputs, and cut where the plan cuts it; only this rank's stages are kept. Names
    of parameters and buffers are the model's own.
    """

    _flushes = True

    def __init__(
        self,
        build_model: Build | Captured,
        plan: Plan | RunnablePlan | str | Path,
        loss_fn: LossFunction | None = None,
        *,
        checkpoint: str | Path | Mapping[str, Tensor] | None = None,
        options: PipelineOptions | None = None,
        **changes: Any,
    ) -> None:
        """`loss_fn(output, target)` is a mean, a sum, or (sum, count); without it the model returns its loss.

        Over what a mean is taken is recognised, such as labels that are not ignored; where it cannot be, one rank
        warns and micro-batches weigh by their samples. `token_mean` says it. The gradients are those of one loss
        of the whole mini-batch.

        A model that was captured already may stand in place of `build_model`; it is trained itself, not a copy.
        `checkpoint` is the state of the whole model: a mapping, a safetensors file or folder, or a .pt file; each
        rank reads its own part. A model that is built on the meta device takes memory for this rank's stages only,
        filled from the checkpoint or by its modules' `reset_parameters`.

        The rest is in `options`, whose fields may also be given here by name: `Pipeline(…, device="cuda:1")`.
        """
        told = replace(options or PipelineOptions(), **changes)
        runnable = as_runnable(plan, flushes=self._flushes)
        self.plan, self._schedule, self._sizes = runnable.plan, runnable.schedule, runnable.sizes
        self.rank = join(self.plan, told.timeout)
        self.device = device_of(self.plan, told.device)
        keep_in_pages(self.device)
        self.stages = self._schedule.stages_of(self.rank)
        """the (virtual) stages of this rank"""
        self.steps = 0
        """mini-batches trained so far"""
        self.trace: RankTrace | None = None
        """what this rank did in the last mini-batch"""
        stages = [self._schedule.stages_of(rank) for rank in range(len(self.plan.ranks))]
        self.watch = told.watch or Watch(stages, timeout=told.timeout)
        """tells this rank of others that fail, and them of this one"""
        self.timeout = datetime.timedelta(seconds=told.timeout)
        """how long a silent rank is waited for"""
        self._autocast = told.autocast
        self._dtypes_known = False
        with self.watch.guard():
            captured = planned_model(build_model, self.plan, told.seed)
            self._prepare(captured, loss_fn, checkpoint=checkpoint, seed=told.seed or 0)
            self._transport = make_transport(told.transport, device=self.device, timeout=told.timeout)
        note = self.watch.progress.note_action
        self.clock = clock_for(self.device)
        self.executor = Executor(
            self.rank,
            self._schedule,
            self._runners,
            self._transport,
            messages=lambda boundary, item, onward: self._own.message(boundary, self._sizes[item], onward),
            reducers=self._reducers,
            clock=self.clock,
            on_action=note if told.on_action is None else _both(note, told.on_action),
            on_gradients=self._tied.start,
        )
        self.watch.follow(self.executor)

    def _prepare(
        self,
        captured: Captured,
        loss_fn: LossFunction | None,
        *,
        checkpoint: str | Path | Mapping[str, Tensor] | None,
        seed: int,
    ) -> None:
        """This rank's stages, and with whom it sums what."""
        users = stage_parameters(captured, self.plan)
        materialise_stages(captured, self.plan, self.stages, checkpoint, seed)
        self.aliases = other_names(captured.module)
        """other names in the model's state_dict -> the first name of the same tensor"""
        self._unused = unused_state(captured) if self.rank == 0 else {}
        self._own = own_stages(
            captured, self.plan, self._schedule, rank=self.rank, sizes=self._sizes, device=self.device
        )
        self._is_last = self._schedule.num_stages - 1 in self.stages
        speaks = self._schedule.placement[-1][0] == self.rank
        self._weighing = Weighing(loss_fn, self._own.loss, warns=speaks)
        self._loss = LossSum(self._weighing, self._sizes)
        self._runners = self._make_runners()
        self._parameters = {
            name: parameter
            for runner in self._runners.values()
            for name, parameter in runner.module.named_parameters()
        }
        self._reducers, self._tied = self._make_sums(users)
        first = [ranks[0] for ranks in self._schedule.placement]
        self._speaker = {name: first[stages[0]] for name, stages in users.items()}
        """parameter, or slice of one -> the rank that speaks for it"""
        for stage, runner in self._runners.items():
            self._speaker |= dict.fromkeys(runner.module.stage_slices, first[stage])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of threads and links; every rank has taken its last step. `with Pipeline(…) as pipe:` does it."""
        self.watch.close()
        self._transport.close()

    @property
    def transport(self) -> str:
        """How tensors get to other ranks."""
        return self._transport.name

    def _make_runners(self) -> dict[int, StageRunner]:
        last = self._schedule.num_stages - 1
        parted = self._schedule.parted_stages()
        return {
            index: StageRunner(
                index,
                modules,
                sizes=self._sizes,
                evaluation=self._own.evaluation[index],
                device=self.device,
                recompute=self.plan.stages[index].recompute,
                parted=index in parted,
                loss=self._loss if index == last else None,
                output=self._own.output if index == last else None,
            )
            for index, modules in self._own.stages.items()
        }

    def _make_sums(self, users: Mapping[str, tuple[int, ...]]) -> tuple[dict[int, Reducer], TiedWeights]:
        """Who sums what with whom."""
        own = {stage: dict(runner.module.named_parameters()) for stage, runner in self._runners.items()}
        return make_sums(self._schedule.placement, users, own, timeout=self.timeout)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Those of this rank's stages, for an optimizer."""
        return iter(self._parameters.values())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Under the model's own names; of tied ones the first."""
        return iter(self._parameters.items())

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        for runner in self._runners.values():
            saved = runner.module.state_dict(keep_vars=True)
            for name, buffer in runner.module.named_buffers():
                if name in saved:
                    yield name, buffer

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and saved buffers of this rank's stages, under the model's own names."""
        return {
            **{name: parameter.detach() for name, parameter in self._parameters.items()},
            **dict(self.named_buffers()),
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy this rank's part out of the state of the whole model."""
        own = list(self.held())
        missing = sorted({name for name, _, _ in own if name not in state})
        if missing:
            raise BaPipeError(
                f"the state lacks '{missing[0]}' and {len(missing) - 1} more of this stage's entries; "
                "give the whole model's state_dict"
            )
        with torch.no_grad():
            for name, tensor, part in own:
                whole = [part.of if part and part.dim == dim else size for dim, size in enumerate(tensor.shape)]
                if whole != list(state[name].shape):
                    raise BaPipeError(
                        f"'{name}' has shape {tuple(whole)}, the state has {tuple(state[name].shape)}; "
                        "give the state of this model"
                    )
                tensor.copy_(state[name].narrow(part.dim, part.start, part.size) if part else state[name])

    def held(self, *, buffers_once: bool = False) -> Iterator[tuple[str, Tensor, Slice | None]]:
        """All that this rank keeps of the model's state: the first name of each tensor, and which part it is.

        A part of None is all of it. Rank 0 also has what no stage uses. With `buffers_once` only the first replica
        of a stage has its buffers: running statistics differ between replicas, each of which saw other samples.
        """
        for index, runner in self._runners.items():
            stage = runner.module
            saved = stage.state_dict(keep_vars=True)
            speaks = self._schedule.placement[index][0] == self.rank
            buffers = stage.named_buffers() if speaks or not buffers_once else ()
            for name, tensor in (*stage.named_parameters(), *buffers):
                if name in saved:
                    yield self.aliases.get(name, name), tensor, stage.stage_slices.get(name)
        for name, tensor in self._unused.items():
            yield name, tensor, None

    def step(self, inputs: Any, targets: Any = None, *, scaler: torch.amp.GradScaler | None = None) -> float:
        """Train on one mini-batch: gradients are added to `.grad`; the loss is returned on every rank.

        Every rank may give the whole mini-batch; stages that take no input may give None. A `scaler` (see
        `grad_scaler`) multiplies the loss, and so the gradients, with its scale. Raises RunError where this rank
        or another one fails, and BaPipeError, before anything runs, where the mini-batch is not the planned one.
        """
        with self.watch.guard():
            self.watch.progress.begin(self.steps)
            loss = self._step(inputs, targets, scaler)
            self.watch.progress.note(f"after step {self.steps - 1}")
        return loss

    def _step(self, inputs: Any, targets: Any, scaler: torch.amp.GradScaler | None) -> float:
        cut = self._cut(inputs, targets)
        before = self._set_gradients_aside()
        self._loss.scale = None if scaler is None else scaler.scale(torch.ones((), device=self.device))
        self.trace = self._run(*cut, training=True)
        reduced = [self._reduced(stage, reducer) for stage, reducer in self._reducers.items()]
        self.trace = replace(self.trace, events=(*self.trace.events, *reduced))
        with self.watch.meeting("summing tied gradients"):
            self._tied.finish()
        loss = self._agree(divide=True)
        for parameter, gradient in before:
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)
        self.steps += 1
        return loss

    def evaluate(self, inputs: Any, targets: Any = None) -> float:
        """The loss of one mini-batch in evaluation mode, on every rank; nothing changes. Raises as `step` does."""
        with self.watch.guard():
            self.watch.progress.note(f"evaluating after {self.steps} steps")
            return self._evaluate(inputs, targets)

    def _evaluate(self, inputs: Any, targets: Any) -> float:
        cut = self._cut(inputs, targets)
        written = [(buffer, buffer.clone()) for _, buffer in self.named_buffers()]
        self._loss.scale = None
        self._run(*cut, training=False)
        with torch.no_grad():
            for buffer, value in written:
                buffer.copy_(value)
        return self._agree(divide=False)

    def grad_scaler(self, **options: Any) -> torch.amp.GradScaler:
        """A GradScaler for fp16 with one scale for all ranks: an infinite gradient on one skips all updates."""
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(device=self.device.type, process_group=dist.group.WORLD, **options)

    def _cut(self, inputs: Any, targets: Any) -> tuple[list[Any], list[Any]]:
        """Each micro-batch's input leaves and target, empty where they are not needed here."""
        leaves: list[Any] = []
        own_targets: list[Any] = []
        needed = set(self._own.needed)
        if needed and inputs is None:
            raise BaPipeError(f"rank {self.rank} needs the inputs, got None; give every rank the mini-batch")
        # A rank that needs none of it looks at it all the same, so that all ranks refuse a wrong one.
        if inputs is not None:
            leaves = split_inputs(self._own.inputs, inputs, self._sizes, needed=needed)
        if targets is not None:
            device = self.device if self._is_last else torch.device("cpu")
            own_targets = split_targets(targets, self._sizes, device)
        return leaves, own_targets

    def _run(self, leaves: list[Any], own_targets: list[Any], *, training: bool) -> RankTrace:
        self._loss.begin()
        if self._autocast is None:
            return self.executor.run(self.steps, inputs=leaves, targets=own_targets, training=training)
        for runner in self._runners.values():
            if runner.stage < self._schedule.num_stages - 1:
                message = self._own.message(runner.stage, self._sizes[0], True)
                runner.sent_dtypes = tuple(about.dtype for about in message)
        with torch.autocast(self.device.type, self._autocast):
            trace = self.executor.run(self.steps, inputs=leaves, targets=own_targets, training=training)
        self._agree_on_dtypes()
        return trace

    def _agree_on_dtypes(self) -> None:
        """Autocast decides in which dtype a value is made: after the first mini-batch it crosses as it is made."""
        if self._dtypes_known:
            return
        made = {runner.stage: runner.made_dtypes for runner in self._runners.values() if runner.made_dtypes}
        everywhere: list[dict[int, tuple[torch.dtype, ...]]] = [{}] * dist.get_world_size()
        with self.watch.meeting("agreeing on dtypes"), guarded(None):
            dist.all_gather_object(everywhere, made)
        for boundary, dtypes in sorted({key: item for rank in everywhere for key, item in rank.items()}.items()):
            self._own.set_dtypes(boundary, dtypes)
        self._dtypes_known = True

    def _reduced(self, stage: int, reducer: Reducer) -> tuple[str, float, float]:
        """Finish a stage's all-reduce and say how long that took."""
        start = self.clock.mark()
        with self.watch.meeting(f"all-reduce {stage}A"):
            reducer.finish()
        begun, ended = self.clock.times([start, self.clock.mark()])
        return f"{stage}A", begun, ended

    def _set_gradients_aside(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Gradients of earlier mini-batches were summed and divided already: this one's join them at the end."""
        kept = [(item, item.grad) for item in self._parameters.values() if item.grad is not None]
        for parameter, _ in kept:
            parameter.grad = None
        return kept

    def _agree(self, *, divide: bool) -> float:
        """The loss of the mini-batch, from those that computed it; divides gradients by the count, if any.

        Where nothing was counted the loss is no number, as in one process, and the gradients are 0.
        """
        sums = torch.tensor(self._loss.sums(), dtype=torch.float64)
        with self.watch.meeting("summing the loss"), guarded(None):
            dist.all_reduce(sums)
        totals = LossTotals(*sums.tolist())
        divisor = totals.divisor()
        if divisor is None:
            return totals.loss
        if divisor == 0:
            return math.nan
        if divide:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad /= divisor
        return totals.loss / divisor

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scale all gradients so that their joint norm is at most `max_norm`; returns the norm before.

        A weight on several ranks counts once.
        """
        own = [parameter.grad for parameter in self._counted() if parameter.grad is not None]
        norms = [torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float64) for gradient in own]
        infinite = norm_type == float("inf")
        part = torch.zeros((), dtype=torch.float64)
        if norms:
            stacked = torch.stack([norm.cpu() for norm in norms])
            part = stacked.max() if infinite else (stacked**norm_type).sum()
        with self.watch.guard(), self.watch.meeting("clipping gradients"), guarded(None):
            dist.all_reduce(part, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM)
        total = float(part) if infinite else float(part) ** (1 / norm_type)
        factor = max_norm / (total + 1e-6)
        if factor < 1:
            for parameter in self._parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        return total

    def _counted(self) -> Iterator[nn.Parameter]:
        """Parameters for which this rank speaks: it is the first that holds them."""
        for name, parameter in self._parameters.items():
            if self._speaker[name] == self.rank:
                yield parameter


def _both(first: Callable[[Action], None], second: Callable[[Action], None]) -> Callable[[Action], None]:
    def call(action: Action) -> None:
        first(action)
        second(action)

    return call
