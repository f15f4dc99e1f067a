"""The engine of one rank: its stages, its channels to other ranks, its watchdog, and a global batch through them.

`Pipeline` and `PipeDream` each hold one. An engine is made in phases, each of which is logged at INFO:

    capture   the model -> layers, cut where the plan cuts it
    build     this rank's stages on its device, with weights
    connect   process groups and the transport to other ranks
"""

from __future__ import annotations

import atexit
import datetime
import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from bapipe.torch.comm import Message, Transport, guarded
from bapipe.torch.comm.choose_transport import Connection, connect
from bapipe.torch.comm.nccl import abort_nccl
from bapipe.torch.compiling.compiled_layers import CompiledPrograms
from bapipe.torch.device.allocator import keep_in_pages
from bapipe.torch.device.dtypes import autocast_dtype
from bapipe.torch.device.precision_modes import MixedForward, set_precision
from bapipe.torch.device.take_device import take_device
from bapipe.torch.health.process_exit import FAILED, on_leaving
from bapipe.torch.health.watchdog import Watch
from bapipe.torch.runtime.action_clock import clock_for
from bapipe.torch.runtime.batch_layout import BatchLayout, LayoutAgreement
from bapipe.torch.runtime.build_stages import Build, materialise_stages, planned_model, stage_parameters
from bapipe.torch.runtime.engines import check_engine, check_torch_version
from bapipe.torch.runtime.executor import Executor, RankTrace
from bapipe.torch.runtime.gradient_norms import GradientNorms
from bapipe.torch.runtime.gradient_sync import MakeSums, Reducer, TiedWeights
from bapipe.torch.runtime.nonfinite import NonFiniteSearch, layer_weights
from bapipe.torch.runtime.optimizer_shards import OptimizerShards
from bapipe.torch.runtime.pipeline_options import PipelineOptions
from bapipe.torch.runtime.plan_checks import RunnablePlan, check_precision
from bapipe.torch.runtime.process_group import device_of, join, planned_rank
from bapipe.torch.runtime.rank_batches import MicroBatches, RankNeeds, cut_batch
from bapipe.torch.runtime.rank_slice import take_slice
from bapipe.torch.runtime.rank_state import RankState
from bapipe.torch.runtime.run_channels import run_channels
from bapipe.torch.runtime.run_settings import run_settings
from bapipe.torch.runtime.stage_maker import StageMaker
from bapipe.torch.runtime.torch_connection import connect_torch, pipelining_group
from bapipe.torch.stage.forward_watch import ForwardWatch, NotFinite
from bapipe.torch.stage.loss import LossFunction, LossSum, LossTotals

if TYPE_CHECKING:
    from bapipe.torch.runtime.torch_executor import TorchExecutor

__all__ = ["Engine"]

_logger = logging.getLogger(__name__)


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
        check_engine(self.plan, self.schedule, options.engine, compiled=options.compile)
        check_torch_version(options.engine, torch.__version__)
        self.name = options.engine
        """what runs the stages: bapipe or torch"""
        if not dist.is_initialized():
            take_slice(self.plan, planned_rank(self.plan), None if options.device is None else str(options.device))
        self._owns_group = not dist.is_initialized()
        self.rank = join(self.plan, options.timeout)
        self.device = device_of(self.plan, options.device)
        take_device(self.device)
        keep_in_pages(self.device)
        self.stages = tuple(self.schedule.stages_of(self.rank))
        """the (virtual) stages of this rank"""
        self.is_last = self.schedule.num_stages - 1 in self.stages
        """whether this rank computes the loss"""
        self.steps = 0
        """global batches trained so far"""
        self.step_times: tuple[Sequence[float], float] = ((), 0.0)
        """of the last sum of losses: every rank's seconds of compute, and the mean of what the step took them"""
        self.has_loss = True
        """whether the last global batch had one; False: its targets were not given"""
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
        # torch's engine has its buffers before the first batch: values cross as they were captured.
        self._dtypes_known = self.name == "torch"
        with self.watch.guard():
            self._phase("capturing the model")
            captured = planned_model(build_model, self.plan, options.seed, self.precision, autocast)
            self.structure = structure_of(captured)
            """what the whole model computes"""
            self.settings = run_settings(self.schedule, options.seed, loss_fn)
            """what else a checkpoint records of this training"""
            self._phase(f"building {_named_stages(self.stages)} on {self.device}")
            users = stage_parameters(captured, self.plan)
            maker = StageMaker(
                plan=self.plan,
                schedule=self.schedule,
                rank=self.rank,
                sizes=self.sizes,
                device=self.device,
                engine=self.name,
                mixed=self._mixed,
                programs=self._make_programs(options.compile),
            )
            self.programs = maker.programs
            """the compiled layers of this rank; None: they run as they were captured"""
            captures = maker.captures(captured, options.lengths)
            materialise_stages(captured, self.plan, self.stages, checkpoint, options.seed or 0, self.structure)
            self.forms = maker.forms(captures)
            """positions of sequences, None: as in the example -> the stages of this rank for them"""
            self.own = self.forms[None]
            """the stages of this rank, as in the example"""
            # One replica of the last stage warns where it is not known over what the loss is a mean.
            self.weighing = maker.weighing(loss_fn, self.own, warns=self.schedule.placement[-1][0] == self.rank)
            self.loss = LossSum(self.weighing, self.sizes)
            self.layout = BatchLayout(sizes=self.sizes)
            """of the last global batch, as planned before the first"""
            self.needs = RankNeeds(
                rank=self.rank,
                inputs=self.own.needed,
                stages=self.own.taking,
                targets=self.schedule.num_stages - 1 if self.is_last and loss_fn is not None else None,
                schedule=self.schedule,
            )
            """which data this rank needs"""
            self.takes_targets = loss_fn is not None
            """whether the loss takes targets; False: the model returns it"""
            self._agreement = LayoutAgreement(self.sizes, rank=self.rank, source=self.schedule.rank_of(0, 0))
            self._require_running()
            self._runners = {length: maker.runners(own, self.loss) for length, own in self.forms.items()}
            self.runners = self._runners[None]
            """what runs this rank's stages, for sequences of the last global batch"""
            self.state = RankState(captured, self.schedule, self.rank, self.runners, users)
            weights = layer_weights(captured, self.plan, self.stages)
            modules = {stage: runner.module for stage, runner in self.runners.items()}
            self.search = NonFiniteSearch(self.rank, self.watch, weights, modules)
            """finds where a loss or gradient that is not finite comes from"""
            self.gradient_norms = GradientNorms(self.rank, self.watch, weights, modules)
            self.on_nonfinite = options.on_nonfinite
            self._phase(f"connecting to {len(self.plan.ranks) - 1} other ranks")
            if self.device.type == "cuda":
                on_leaving(abort_nccl)
            connection = self._connect(options)
            self.transport: Transport = connection.transport
            self.reducers, self.tied = self._make_sums(make_sums, users, connection)
            self.shards = OptimizerShards(self.state.parameters, self.reducers)
            """what of the weights this rank's optimizer steps"""
            self.search.gradient = self.shards.gradient
            on_gpu = self.device.type == "cuda"
            # On GPUs there was a choice, which is worth a line that stays.
            _logger.info("rank %d is ready: %s", self.rank, connection.reason, extra={"lasting": on_gpu})
            self.executor = self._make_executor(options)
        self.watch.follow(self.executor)
        self._open = True
        _close_at_exit(self)

    def _connect(self, options: PipelineOptions) -> Connection:
        if self.name == "torch":
            return connect_torch(options.transport, device=self.device, timeout=options.timeout)
        return connect(
            options.transport,
            device=self.device,
            channels=run_channels(
                self.schedule, lambda boundary, onward: self.own.message(boundary, max(self.sizes), onward)
            ),
            timeout=options.timeout,
        )

    def _make_executor(self, options: PipelineOptions) -> Executor | TorchExecutor:
        note = self.watch.progress.note_action
        on_action = note if options.on_action is None else _both(note, options.on_action)
        if self.name == "torch":
            # torch.distributed.pipelining takes seconds to import.
            from bapipe.torch.runtime.torch_executor import TorchExecutor

            return TorchExecutor(
                self.rank,
                self.schedule,
                self.runners,
                sizes=self.sizes,
                crossing=lambda boundary: list(
                    zip(
                        self.own.message(boundary, self.sizes[0], True),
                        self.own.differentiable[boundary],
                        strict=True,
                    )
                ),
                device=self.device,
                group=pipelining_group(range(len(self.plan.ranks)), self.device, self.timeout),
                clock=self.clock,
                on_action=on_action,
                on_gradients=self.tied.start,
            )
        return Executor(
            self.rank,
            self.schedule,
            self.runners,
            self.transport,
            messages=self._message,
            reducers=self.reducers,
            clock=self.clock,
            on_action=on_action,
            on_gradients=self.tied.start,
        )

    def _require_running(self) -> None:
        """Refuse an order that would stop for ever because over some boundary no gradient comes back, which the
        check of the plan alone cannot know. The same on every rank."""
        if self.name == "torch":
            return  # which keeps any number of messages
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

    def _message(self, boundary: int, microbatch: int, onward: bool) -> Message:
        """What crosses a boundary with a micro-batch of the global batch that is run."""
        return self.forms[self.layout.length].message(boundary, self.layout.sizes[microbatch], onward)

    def _make_programs(self, compile_: bool | None) -> CompiledPrograms | None:
        if not (self.plan.compiled if compile_ is None else compile_):
            return None
        self._phase("compiling its layers")
        split = self.schedule.parted_stages() & set(self.stages)
        return CompiledPrograms(self.device, whole=split != set(self.stages), split=bool(split))

    def _make_sums(
        self, make_sums: MakeSums, users: Mapping[str, tuple[int, ...]], connection: Connection
    ) -> tuple[dict[int, Reducer], TiedWeights]:
        own = {stage: dict(runner.module.named_parameters()) for stage, runner in self.runners.items()}
        reducers, tied = make_sums(
            self.schedule.placement,
            users,
            own,
            lambda ranks: connection.sum_group(ranks, self.device, self.timeout),
        )
        for stage, reducer in reducers.items():
            reducer.hold_back(self.runners[stage].weights_in_parts)
        return reducers, tied

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

    @property
    def lengths(self) -> tuple[int, ...]:
        """Positions that sequences of a batch may have, from the fewest; () where inputs have no sequences."""
        own = self.own.inputs.length
        return (
            () if own is None else tuple(sorted({own, *(length for length in self.forms if length is not None)}))
        )

    def cut(self, inputs: Any, targets: Any) -> MicroBatches:
        """Each micro-batch's input leaves and target, empty where they are not needed here."""
        device = self.device if self.is_last else torch.device("cpu")
        lengths = [length for length in self.forms if length is not None]
        batch = cut_batch(self.own.inputs, self.sizes, self.needs, device, inputs, targets, lengths=lengths)
        if batch.layout is not None and not self.own.any_size:
            other = next((size for size in batch.layout.sizes if size not in self.sizes), None)
            if other is not None:
                raise BaPipeError(
                    f"the model fixes its batch, and a micro-batch of {other} samples is left of "
                    f"{batch.layout.samples}; leave short batches out (drop_last=True), or give a multiple of "
                    f"{min(self.sizes)}"
                )
        return batch

    def agree(self, batch: MicroBatches, kind: str) -> None:
        """All ranks begin a global batch, and know from now on what is in it. `kind` is what is done with it."""
        with self.watch.meeting("hearing of the batch"):
            self.layout = self._agreement.layout(batch.layout, kind=kind, step=self.steps)
        self.runners = self._runners[self.layout.length]
        self.executor.use(self.runners, self.layout.length)

    def run(self, batch: MicroBatches, *, training: bool) -> RankTrace | None:
        """One global batch through the executor; what this rank did, if that is traced."""
        self.loss.begin(self.layout.sizes)
        if self._mixed is None:
            return self._execute(batch, training=training)
        for runner in self.runners.values():
            if runner.stage < self.schedule.num_stages - 1:
                message = self._message(runner.stage, 0, True)
                runner.sent_dtypes = tuple(about.dtype for about in message)
        with self._mixed.batch():
            trace = self._execute(batch, training=training)
        self._agree_on_dtypes()
        return trace

    def _execute(self, batch: MicroBatches, *, training: bool) -> RankTrace | None:
        return self.executor.run(
            self.steps, inputs=batch.inputs, targets=batch.targets, training=training, sizes=self.layout.sizes
        )

    def _agree_on_dtypes(self) -> None:
        """Autocast decides in which dtype a value is made: after the first batch it crosses as it is made."""
        if self._dtypes_known:
            return
        made = {runner.stage: runner.made_dtypes for runner in self.runners.values() if runner.made_dtypes}
        everywhere: list[dict[int, tuple[torch.dtype, ...]]] = [{}] * dist.get_world_size()
        with self.watch.meeting("agreeing on dtypes"), guarded(None):
            dist.all_gather_object(everywhere, made)
        for boundary, dtypes in sorted({key: item for rank in everywhere for key, item in rank.items()}.items()):
            for own in self.forms.values():
                own.set_dtypes(boundary, dtypes)
        self._dtypes_known = True

    def summed_loss(self, *, divide: bool, times: tuple[float, float] = (0.0, 0.0)) -> float:
        """The loss of the global batch, from the ranks that computed it; divides gradients by the count, if any.

        Where nothing was counted the loss is no number, as in one process, and the gradients are 0. `times` are
        this rank's seconds of compute and of the step, which go along: `step_times` has those of all ranks.
        """
        own = [0.0] * len(self.plan.ranks)
        own[self.rank] = times[0]
        last = self.runners.get(self.schedule.num_stages - 1)
        skips = float(last is not None and last.skips_loss)
        with self.watch.meeting("summing the loss"), guarded(None):
            # Reading the sums waits for the device, and so for what NCCL has under way on it with other ranks.
            losses = self.loss.sums()
            sums = torch.tensor([*losses, *own, times[1], skips], dtype=torch.float64)
            dist.all_reduce(sums)
            self._agreement.finish()
        found = sums.tolist()
        totals = LossTotals(*found[: len(losses)])
        self.step_times = found[len(losses) : -2], found[-2] / len(own)
        self.has_loss = found[-1] == 0
        divisor = totals.divisor()
        if divisor is None:
            return totals.loss
        if divisor == 0:
            return math.nan
        if divide:
            for parameter in self.shards.stepped():
                if parameter.grad is not None:
                    parameter.grad /= divisor
        return totals.loss / divisor

    def counted_gradients(self) -> list[Tensor]:
        """Gradients that are there on this rank, or shards of them; over all ranks each element is there once."""
        owned = [item for item in self.state.owned() if not self.shards.is_shared(item)]
        shards = [item for item in self.shards.stepped() if self.shards.shard(item) is not None]
        return [item.grad for item in (*owned, *shards) if item.grad is not None]

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
