"""The engine of one rank: its stages, its channels to other ranks, its watchdog, and a global batch through them.

`Pipeline` and `PipeDream` each hold one. An engine is made in phases, each of which is logged at INFO:

    capture   the model -> layers, cut where the plan cuts it
    build     this rank's stages on its device, with weights
    connect   process groups and the transport to other ranks
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.errors import BaPipeError
from bapipe.hardware.precision import Precision, find_precision
from bapipe.records.plan import Plan
from bapipe.schedule.actions import Action
from bapipe.schedule.validate import require_valid
from bapipe.torch.capturing import Captured
from bapipe.torch.capturing.model_structure import structure_of
from bapipe.torch.comm import Transport, guarded
from bapipe.torch.comm.choose_transport import Connection, connect
from bapipe.torch.comm.nccl import abort_nccl
from bapipe.torch.compiling.compiled_layers import CompiledPrograms
from bapipe.torch.device.allocator import keep_in_pages
from bapipe.torch.device.dtypes import autocast_dtype
from bapipe.torch.device.precision_modes import MixedForward, set_precision
from bapipe.torch.health.process_exit import FAILED, on_leaving
from bapipe.torch.health.watchdog import Watch
from bapipe.torch.runtime.action_clock import clock_for
from bapipe.torch.runtime.build_stages import (
    Build,
    OwnStages,
    materialise_stages,
    own_stages,
    planned_model,
    stage_parameters,
)
from bapipe.torch.runtime.executor import Executor, RankTrace
from bapipe.torch.runtime.gradient_sync import MakeSums, Reducer, TiedWeights
from bapipe.torch.runtime.microbatches import split_inputs, split_targets
from bapipe.torch.runtime.nonfinite import NonFiniteSearch, layer_weights
from bapipe.torch.runtime.pipeline_options import PipelineOptions
from bapipe.torch.runtime.plan_checks import RunnablePlan, check_precision
from bapipe.torch.runtime.process_group import device_of, join, planned_rank
from bapipe.torch.runtime.rank_slice import take_slice
from bapipe.torch.runtime.rank_state import RankState
from bapipe.torch.runtime.run_channels import run_channels
from bapipe.torch.runtime.run_settings import run_settings
from bapipe.torch.stage.compiled_loss import CompiledWeighing
from bapipe.torch.stage.forward_watch import ForwardWatch, NotFinite
from bapipe.torch.stage.loss import LossFunction, LossSum, LossTotals
from bapipe.torch.stage.loss_weighing import Weighing
from bapipe.torch.stage.runner import StageRunner

__all__ = ["Engine", "MicroBatches"]

_logger = logging.getLogger(__name__)
MicroBatches = tuple[list[Any], list[Any]]
"""each micro-batch's input leaves, and its target; empty where a rank needs none"""


class Engine:
    """All that training by a plan takes on one rank; made on every rank at once."""

    def __init__(
        self,
        build_model: Build | Captured,
        runnable: RunnablePlan,
        loss_fn: LossFunction | None,
        *,
        checkpoint: str | Path | Mapping[str, Tensor] | None,
        options: PipelineOptions,
        make_sums: MakeSums,
    ) -> None:
        """`make_sums` says which gradients are summed over which ranks; the rest is as in `Pipeline`."""
        self.plan, self.schedule, self.sizes = runnable.plan, runnable.schedule, runnable.sizes
        if not dist.is_initialized():
            take_slice(self.plan, planned_rank(self.plan), None if options.device is None else str(options.device))
        self._owns_group = not dist.is_initialized()
        self.rank = join(self.plan, options.timeout)
        self.device = device_of(self.plan, options.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        keep_in_pages(self.device)
        self.stages = tuple(self.schedule.stages_of(self.rank))
        """the (virtual) stages of this rank"""
        self.is_last = self.schedule.num_stages - 1 in self.stages
        """whether this rank computes the loss"""
        self.steps = 0
        """global batches trained so far"""
        self.step_times: tuple[Sequence[float], float] = ((), 0.0)
        """of the last sum of losses: every rank's seconds of compute, and the mean of what the step took them"""
        self.watch = options.watch or Watch(runnable.stages_by_rank(), timeout=options.timeout)
        """notices ranks that fail, and lets others know if this one does"""
        self.timeout = datetime.timedelta(seconds=options.timeout)
        """how long a silent rank is waited for"""
        self.clock = clock_for(self.device, trace=options.trace)
        self.precision = _precision(self.plan, options)
        """what it trains in"""
        self.precision_word = self.precision.word + (
            ""
            if options.autocast is None
            else f" under autocast to {str(options.autocast).removeprefix('torch.')}"
        )
        """the same for people and checkpoints, with what the user casts to"""
        check_precision(self.schedule, self.precision)
        set_precision(self.precision, self.device)
        autocast = options.autocast or autocast_dtype(self.precision)
        self._mixed = None if autocast is None else MixedForward(self.device, autocast)
        self._dtypes_known = False
        with self.watch.guard():
            self._phase("capturing the model")
            captured = planned_model(build_model, self.plan, options.seed, self.precision, autocast)
            self.structure = structure_of(captured)
            """what the whole model computes"""
            self.settings = run_settings(self.schedule, options.seed, loss_fn)
            """what else a checkpoint records of this training"""
            self._phase(f"building {_named_stages(self.stages)} on {self.device}")
            users = stage_parameters(captured, self.plan)
            self.programs = self._make_programs(options.compile)
            """the compiled layers of this rank; None: they run as they were captured"""
            self.own = self._own_stages(captured, checkpoint, options.seed or 0)
            # One replica of the last stage warns where it is not known over what the loss is a mean.
            self.weighing = self._weighing(loss_fn, warns=self.schedule.placement[-1][0] == self.rank)
            self.loss = LossSum(self.weighing, self.sizes)
            self._require_running()
            self.runners = self._make_runners()
            self.state = RankState(captured, self.schedule, self.rank, self.runners, users)
            self.search = NonFiniteSearch(
                self.rank,
                self.watch,
                layer_weights(captured, self.plan, self.stages),
                {stage: runner.module for stage, runner in self.runners.items()},
            )
            """finds where a loss or gradient that is not finite comes from"""
            self.on_nonfinite = options.on_nonfinite
            self._phase(f"connecting to {len(self.plan.ranks) - 1} other ranks")
            if self.device.type == "cuda":
                on_leaving(abort_nccl)
            connection = connect(
                options.transport,
                device=self.device,
                channels=run_channels(
                    self.schedule, lambda boundary, onward: self.own.message(boundary, max(self.sizes), onward)
                ),
                timeout=options.timeout,
            )
            self.transport: Transport = connection.transport
            self.reducers, self.tied = self._make_sums(make_sums, users, connection)
            on_gpu = self.device.type == "cuda"
            # On GPUs there was a choice, which is worth a line that stays.
            _logger.info("rank %d is ready: %s", self.rank, connection.reason, extra={"lasting": on_gpu})
        note = self.watch.progress.note_action
        self.executor = Executor(
            self.rank,
            self.schedule,
            self.runners,
            self.transport,
            messages=lambda boundary, item, onward: self.own.message(boundary, self.sizes[item], onward),
            reducers=self.reducers,
            clock=self.clock,
            on_action=note if options.on_action is None else _both(note, options.on_action),
            on_gradients=self.tied.start,
        )
        self.watch.follow(self.executor)
        self._open = True
        _close_at_exit(self)

    def _require_running(self) -> None:
        """Refuse an order that would stop for ever because over some boundary no gradient comes back, which the
        check of the plan alone cannot know. The same on every rank."""
        size = max(self.sizes)
        unanswered = [
            boundary
            for boundary in range(self.schedule.num_stages - 1)
            if self.own.message(boundary, size, True) and not self.own.message(boundary, size, False)
        ]
        if unanswered:
            require_valid(self.schedule, sends="windowed", unanswered=unanswered)

    def _phase(self, what: str) -> None:
        self.watch.progress.note(what)
        _logger.info("rank %d is %s", self.rank, what)

    def _own_stages(
        self, captured: Captured, checkpoint: str | Path | Mapping[str, Tensor] | None, seed: int
    ) -> OwnStages:
        materialise_stages(captured, self.plan, self.stages, checkpoint, seed, self.structure)
        with self._casting():  # compiled layers have the casts in them
            own = own_stages(
                captured,
                self.plan,
                self.schedule,
                rank=self.rank,
                sizes=self.sizes,
                device=self.device,
                programs=self.programs,
            )
        if self.programs is not None and not self.programs.compiled:
            reason = next(iter(self.programs.failed.values()), "it has none")
            _logger.warning("rank %d compiles no layer and runs all as captured: %s", self.rank, reason)
        return own

    def _make_programs(self, compile_: bool | None) -> CompiledPrograms | None:
        if not (self.plan.compiled if compile_ is None else compile_):
            return None
        self._phase("compiling its layers")
        split = self.schedule.parted_stages() & set(self.stages)
        return CompiledPrograms(self.device, whole=split != set(self.stages), split=bool(split))

    def _weighing(self, loss_fn: LossFunction | None, *, warns: bool) -> Weighing:
        if self.programs is None:
            return Weighing(loss_fn, self.own.loss, warns=warns)
        return CompiledWeighing(loss_fn, self.own.loss, warns=warns, programs=self.programs)

    def _casting(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._mixed is None else self._mixed.forward()

    def _make_runners(self) -> dict[int, StageRunner]:
        last = self.schedule.num_stages - 1
        split = self.schedule.parted_stages()
        return {
            index: StageRunner(
                index,
                modules,
                sizes=self.sizes,
                evaluation=self.own.evaluation[index],
                device=self.device,
                recompute=self.plan.stages[index].recompute,
                split=index in split,
                loss=self.loss if index == last else None,
                output=self.own.output if index == last else None,
                mixed=self._mixed,
            )
            for index, modules in self.own.stages.items()
        }

    def _make_sums(
        self, make_sums: MakeSums, users: Mapping[str, tuple[int, ...]], connection: Connection
    ) -> tuple[dict[int, Reducer], TiedWeights]:
        own = {stage: dict(runner.module.named_parameters()) for stage, runner in self.runners.items()}
        return make_sums(
            self.schedule.placement,
            users,
            own,
            lambda ranks: connection.sum_group(ranks, self.device, self.timeout),
        )

    def close(self) -> None:
        """Let go of threads and links; every rank has taken its last step."""
        self._open = False
        self.watch.close()
        self.transport.close()

    def close_at_exit(self) -> None:
        """For a script that ends without `close`, in order: threads of gloo that outlive the interpreter can abort
        the process while it goes down. Not in the middle of a global batch, whose receives may never end."""
        if not self._open or FAILED or not self.executor.idle:
            return
        self.close()
        if self._owns_group and self.device.type == "cpu" and dist.is_initialized():
            dist.destroy_process_group()

    def cut(self, inputs: Any, targets: Any) -> MicroBatches:
        """Each micro-batch's input leaves and target, empty where they are not needed here."""
        leaves: list[Any] = []
        own_targets: list[Any] = []
        needed = set(self.own.needed)
        if needed and inputs is None:
            raise BaPipeError(f"rank {self.rank} needs the inputs, got None; give every rank the global batch")
        # A rank that needs none of it looks at it all the same, so that all ranks refuse a wrong one.
        if inputs is not None:
            leaves = split_inputs(self.own.inputs, inputs, self.sizes, needed=needed)
        if targets is not None:
            device = self.device if self.is_last else torch.device("cpu")
            own_targets = split_targets(targets, self.sizes, device)
        return leaves, own_targets

    def run(self, batch: MicroBatches, *, training: bool) -> RankTrace | None:
        """One global batch through the executor; what this rank did, if that is traced."""
        leaves, targets = batch
        self.loss.begin()
        if self._mixed is None:
            return self.executor.run(self.steps, inputs=leaves, targets=targets, training=training)
        for runner in self.runners.values():
            if runner.stage < self.schedule.num_stages - 1:
                message = self.own.message(runner.stage, self.sizes[0], True)
                runner.sent_dtypes = tuple(about.dtype for about in message)
        with self._mixed.batch():
            trace = self.executor.run(self.steps, inputs=leaves, targets=targets, training=training)
        self._agree_on_dtypes()
        return trace

    def _agree_on_dtypes(self) -> None:
        """Autocast decides in which dtype a value is made: after the first batch it crosses as it is made."""
        if self._dtypes_known:
            return
        made = {runner.stage: runner.made_dtypes for runner in self.runners.values() if runner.made_dtypes}
        everywhere: list[dict[int, tuple[torch.dtype, ...]]] = [{}] * dist.get_world_size()
        with self.watch.meeting("agreeing on dtypes"), guarded(None):
            dist.all_gather_object(everywhere, made)
        for boundary, dtypes in sorted({key: item for rank in everywhere for key, item in rank.items()}.items()):
            self.own.set_dtypes(boundary, dtypes)
        self._dtypes_known = True

    def summed_loss(self, *, divide: bool, times: tuple[float, float] = (0.0, 0.0)) -> float:
        """The loss of the global batch, from the ranks that computed it; divides gradients by the count, if any.

        Where nothing was counted the loss is no number, as in one process, and the gradients are 0. `times` are
        this rank's seconds of compute and of the step, which go along: `step_times` has those of all ranks.
        """
        own = [0.0] * len(self.plan.ranks)
        own[self.rank] = times[0]
        with self.watch.meeting("summing the loss"), guarded(None):
            # Reading the sums waits for the device, and so for what NCCL has under way on it with other ranks.
            losses = self.loss.sums()
            sums = torch.tensor([*losses, *own, times[1]], dtype=torch.float64)
            dist.all_reduce(sums)
        found = sums.tolist()
        totals = LossTotals(*found[: len(losses)])
        self.step_times = found[len(losses) : -1], found[-1] / len(own)
        divisor = totals.divisor()
        if divisor is None:
            return totals.loss
        if divisor == 0:
            return math.nan
        if divide:
            for parameter in self.state.parameters.values():
                if parameter.grad is not None:
                    parameter.grad /= divisor
        return totals.loss / divisor

    def replay(self, batch: MicroBatches, step: int) -> dict[int, NotFinite]:
        """Run the forward of a step's global batch again, as it was in training; all ranks do.

        Returns what was not finite, by this rank's stages. Weights, gradients and buffers stay as they are.
        """
        written = [
            (buffer, buffer.clone()) for runner in self.runners.values() for buffer in runner.module.buffers()
        ]
        watches = {stage: ForwardWatch() for stage in self.runners}
        steps, self.steps = self.steps, step
        for stage, runner in self.runners.items():
            runner.forward_watch = watches[stage]
        try:
            self.run(batch, training=False)
        finally:
            self.steps = steps
            for runner in self.runners.values():
                runner.forward_watch = None
            with torch.no_grad():
                for buffer, value in written:
                    buffer.copy_(value)
        return {stage: watch.found for stage, watch in watches.items() if watch.found is not None}

    def evaluate(self, inputs: Any, targets: Any) -> float:
        """The loss of one global batch in evaluation mode, on every rank; nothing changes."""
        with self.watch.guard():
            self.watch.progress.note(f"evaluating after {self.steps} steps")
            batch = self.cut(inputs, targets)
            written = [(buffer, buffer.clone()) for _, buffer in self.state.named_buffers()]
            self.loss.scale = None
            self.run(batch, training=False)
            with torch.no_grad():
                for buffer, value in written:
                    buffer.copy_(value)
            return self.summed_loss(divide=False)


def _close_at_exit(engine: Engine) -> None:
    """Registered without keeping the engine alive."""
    known = weakref.ref(engine)

    def close() -> None:
        if (found := known()) is not None:
            found.close_at_exit()

    atexit.register(close)
    weakref.finalize(engine, atexit.unregister, close).atexit = False


def _precision(plan: Plan, options: PipelineOptions) -> Precision:
    """What is asked for, else what the plan is for."""
    planned = plan.precision
    if options.precision is None:
        return planned
    wanted = find_precision(options.precision)
    if wanted != planned:
        _logger.warning(
            "the plan is for %s and this trains in %s: its times and memory are not this training's",
            planned.word,
            wanted.word,
        )
    return wanted


def _named_stages(stages: tuple[int, ...]) -> str:
    return f"stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"


def _both(first: Callable[[Action], None], second: Callable[[Action], None]) -> Callable[[Action], None]:
    def call(action: Action) -> None:
        first(action)
        second(action)

    return call
