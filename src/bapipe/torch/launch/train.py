"""A whole run on one rank: build, keep its stages, train some global batches, and report to rank 0."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from bapipe.records.run_record import CheckRecord, RunRecord, StepRecord
from bapipe.torch.capturing import Captured
from bapipe.torch.capturing.stage_module import Slice
from bapipe.torch.checkpoint.checkpoint_folder import latest
from bapipe.torch.checkpoint.checkpoint_manifest import CheckpointError
from bapipe.torch.comm import LinkError
from bapipe.torch.comm.rank_agreement import clock_offset, gathered, machine_name, max_over_ranks, sum_over_ranks
from bapipe.torch.device.dtypes import autocast_dtype
from bapipe.torch.health.failure import Failure, RunError
from bapipe.torch.health.stragglers import Straggler
from bapipe.torch.health.watchdog import Watch
from bapipe.torch.inputs.build_model import BuiltModel, build_model
from bapipe.torch.inputs.make_optimizer import make_optimizer
from bapipe.torch.inputs.training_data import batches_for
from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.launch.run_report import RankReport, make_record, median_step
from bapipe.torch.runtime.executor import RankTrace
from bapipe.torch.runtime.pipeline import Pipeline
from bapipe.torch.runtime.pipeline_options import PipelineOptions
from bapipe.torch.runtime.plan_checks import RunnablePlan
from bapipe.torch.verify.gradient_check import Gradients, Scaled, compare_gradients, copied, joined

if TYPE_CHECKING:
    from bapipe.torch.checkpoint.checkpoints import Checkpoints, Loaded

__all__ = [
    "OnStep",
    "PreparedModel",
    "Training",
    "check_record",
    "peak_memory",
    "pipeline_options",
    "rank_report",
    "train",
]

_KEPT_STEPS = 9
"""of the last so many steps the one of median time is recorded"""
OnStep = Callable[[StepRecord, float | None], None]
"""called with a step and its bubble, None where that is not known"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PreparedModel:
    """A model that is built and captured already."""

    built: BuiltModel
    captured: Captured


class Training:
    """This rank's part of a run, ready for its first step."""

    def __init__(
        self,
        runnable: RunnablePlan,
        options: RunOptions,
        *,
        folders: Sequence[Path] = (),
        watch: Watch | None = None,
        prepared: PreparedModel | None = None,
    ) -> None:
        plan = runnable.plan
        if prepared is None:
            built = build_model(plan.model, folders=folders, seed=options.seed, precision=plan.dtype, hollow=True)
        else:
            built = prepared.built
        self.pipe = Pipeline(
            (lambda: (built.module, built.args, built.kwargs)) if prepared is None else prepared.captured,
            runnable,
            built.loss,
            checkpoint=built.weights,
            options=replace(pipeline_options(options, watch), on_straggler=self._note_straggler),
        )
        self.batches = batches_for(built, options.data, global_batch=plan.global_batch, seed=options.seed)
        self._optimizer = self._make_optimizer(plan.optimizer, options.learning_rate)
        self.scaler = self.pipe.grad_scaler() if plan.precision.scaled else None
        """of fp16-mixed; None: the loss is not scaled"""
        self.loaded: Loaded | None = None
        """where the run goes on from"""
        self.stopped = 0
        """the signal that ends the run before its last step, the same on all ranks; 0: none"""
        self.straggler: Straggler | None = None
        """a rank that the last step showed to be slow, the same on all ranks"""
        self._saving = saving = options.saving
        self._checkpoints: Checkpoints | None = None
        if saving is not None:
            # torch.distributed.checkpoint takes seconds to import.
            from bapipe.torch.checkpoint.checkpoints import Checkpoints

            self._checkpoints = Checkpoints(
                self.pipe,
                saving.folder,
                optimizer=self._optimizer,
                scaler=self.scaler,
                keep=saving.keep,
                asynchronous=saving.asynchronous,
                settings={"seed": options.seed, "the data": options.data},
            )
            self._checkpoints.lock()
            if saving.resume:
                self.loaded = self._checkpoints.load(accept_changes=saving.accept_changes)
        self._saved = self.pipe.steps
        """steps that the last checkpoint has"""

    def _make_optimizer(self, text: str, rate: float) -> torch.optim.Optimizer | None:
        """Over what this rank steps; None where that is nothing."""
        trained = [item for item in self.pipe.parameters() if item.requires_grad]
        if not trained:
            return None
        return self.pipe.make_optimizer(lambda own: _some(make_optimizer(text, own, rate=rate)), trained)

    def save(self, *, is_last: bool) -> None:
        """Save what is trained, where it is time to."""
        if self._checkpoints is None or self._saving is None:
            return
        if is_last or self._saving.is_due(self.pipe.steps):
            self._save()

    def _save(self) -> None:
        if self._checkpoints is not None and self.pipe.steps > self._saved:
            self._checkpoints.save(data=self.pipe.steps)
            self._saved = self.pipe.steps

    def _note_straggler(self, found: Straggler) -> None:
        self.straggler = found

    def leave_slow(self, found: Straggler) -> Failure:
        """A rank has become slow, and the run ends here to be planned again: save what is trained."""
        self._save()
        unsaved = self.close()
        with contextlib.suppress(LinkError):
            sum_over_ranks(0.0)  # nobody leaves while another still reads what it sent
        text = f"{found.line}; the run ends after {self.pipe.steps} steps to be planned again"
        text = text if unsaved is None else f"{text}; {unsaved}"
        return Failure(
            rank=found.rank, by=dist.get_rank(), where="", reason=text, slowed=found.factor, at=time.time()
        )

    def stop(self) -> Failure:
        """A signal ends the run here, after the same step on all ranks: save what is trained. Says so."""
        self._save()
        unsaved, found = self.close(), None if self._saving is None else latest(self._saving.folder)
        with contextlib.suppress(LinkError):
            sum_over_ranks(0.0)  # nobody leaves while another still reads what it sent
        text = f"stopped by {signal.Signals(self.stopped).name} after {self.pipe.steps} steps"
        if unsaved is not None:
            text = f"{text}; {unsaved}"
        elif found is not None:
            text = f"{text}, saved as {found}; --resume goes on there"
        rank = dist.get_rank()
        return Failure(rank=rank, by=rank, where="", reason=text, code=128 + self.stopped, at=time.time())

    def close(self) -> str | None:
        """Wait for the last checkpoint; returns why it could not be written."""
        try:
            if self._checkpoints is not None:
                self._checkpoints.close()
        except CheckpointError as error:
            return str(error)
        finally:
            self.pipe.close()
        return None

    def step(self, batch: tuple[Any, Any]) -> tuple[float, RankTrace | None]:
        """One global batch and its optimizer step; gradients stay until the next. No trace where it is off."""
        pipe = self.pipe
        self.straggler = None
        pipe.drop_gradients()
        loss = pipe.step(*batch, scaler=self.scaler)
        if self._optimizer is None:
            self._optimizer_step()
            return loss, pipe.trace
        clock = pipe.clock
        start = clock.mark()
        self._optimizer_step()
        if pipe.trace is None:
            return loss, None
        start, end = clock.times([start, clock.mark()])
        labels = [f"{stage}U" for stage in pipe.stages]
        # One optimizer step is for all stages of the rank; each gets an equal part of that time.
        part = (end - start) / len(labels)
        updates = [(label, start + i * part, start + (i + 1) * part) for i, label in enumerate(labels)]
        return loss, replace(pipe.trace, events=(*pipe.trace.events, *updates))

    def _optimizer_step(self) -> None:
        """With a scaler all ranks take part, also those without an optimizer."""
        if self.scaler is not None:
            self.scaler.step(self._optimizer)
            self.scaler.update()
        elif self._optimizer is not None:
            self._optimizer.step()


def train(
    runnable: RunnablePlan,
    options: RunOptions,
    *,
    folders: Sequence[Path] = (),
    watch: Watch | None = None,
    prepared: PreparedModel | None = None,
    on_step: OnStep | None = None,
    on_ready: Callable[[], None] | None = None,
    on_load: Callable[[Loaded], None] | None = None,
    on_straggler: Callable[[Straggler], None] | None = None,
    on_unsaved: Callable[[str], None] | None = None,
    leaves_slow: bool = False,
) -> RunRecord | None:
    """Run the plan in the process group that is there; rank 0 returns the record, the others None.

    `on_ready` is called on every rank when its stages are built and compiled, before the first step; `on_step` on
    rank 0 after every step, with its bubble: the share of all ranks' time without compute, or None where nothing
    is traced; `on_load` on rank 0 before the first step of a run that goes on from a checkpoint. Where that
    checkpoint is of the last step already, nothing is trained and there is no record.
    `on_unsaved` is called on every rank if the last checkpoint could not be written, with the reason. Where
    checkpoints are saved, a signal that `watch` has caught ends the run after the step that is under way: it is
    saved, and RunError says so, which rank 0 is to report.
    `on_straggler` is called on rank 0 with a rank that has become slow; with `leaves_slow` the run ends instead,
    in the same way, to be planned again.
    `folders` are where to look for the model's code first; a `prepared` model is trained itself.
    """
    training = Training(runnable, options, folders=folders, watch=watch, prepared=prepared)
    if training.loaded is not None and on_load is not None and dist.get_rank() == 0:
        on_load(training.loaded)
    if on_ready is not None:
        on_ready()
    with training.pipe.watch.guard():
        trained = training.pipe.steps >= options.steps
        on_slow = None if leaves_slow else on_straggler or _say_nothing
        record = None if trained else _train(runnable, options, training, folders, on_step, on_slow)
        if training.stopped:
            raise RunError(training.stop(), reported=dist.get_rank() != 0)
        if leaves_slow and training.straggler is not None and training.pipe.steps < options.steps:
            raise RunError(training.leave_slow(training.straggler), reported=dist.get_rank() != 0)
    unsaved = training.close()
    if unsaved is not None and on_unsaved is not None:
        on_unsaved(unsaved)
    return record


def _some(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    assert optimizer is not None, "there is something to train"
    return optimizer


def _say_nothing(_: Straggler) -> None:
    """Where nobody asked."""


def _train(
    runnable: RunnablePlan,
    options: RunOptions,
    training: Training,
    folders: Sequence[Path],
    on_step: OnStep | None,
    on_slow: Callable[[Straggler], None] | None,
) -> RunRecord | None:
    """`on_slow` None: the training is left where a rank has become slow."""
    pipe, rank = training.pipe, dist.get_rank()
    meeting = pipe.watch.meeting
    offset = clock_offset(machine_name())
    traces: deque[RankTrace | None] = deque(maxlen=_KEPT_STEPS)
    steps: list[tuple[float, float]] = []
    kept: list[Gradients] = []
    scales: list[Scaled] = []
    live = dict.fromkeys(pipe.stages, 0)
    first_step = pipe.steps
    checking = options.check and first_step == 0
    pipe.watch.stops_later = options.saving is not None
    for step in range(first_step, options.steps):
        batch = training.batches(step)
        pipe.watch.progress.begin(step)
        with meeting("ready"):
            # All ranks stop before the same step, whichever of them has heard a signal.
            training.stopped = int(max_over_ranks(pipe.watch.stop_signal))
        if training.stopped:
            return None
        scale = None if training.scaler is None else training.scaler.get_scale()
        start = time.perf_counter()
        loss, trace = training.step(batch)
        with meeting("done"):
            busy = sum_over_ranks(0.0 if trace is None else trace.computed)
        steps.append((loss, time.perf_counter() - start))
        traces.append(trace)
        live = {stage: max(count, pipe.peak_in_flight[stage]) for stage, count in live.items()}
        if checking:
            kept.append(copied(pipe.named_parameters(), pipe.gradients()))
            skipped = training.scaler is not None and bool(training.scaler.skipped)
            scales.append(Scaled(scale=scale, skipped=skipped))
        if on_step is not None and rank == 0:
            seconds = steps[-1][1]
            bubble = None if trace is None else max(0.0, 1 - busy / (dist.get_world_size() * seconds))
            on_step(StepRecord(step=step, loss=loss, seconds=seconds), bubble)
        is_last = step == options.steps - 1
        if training.straggler is not None and on_slow is None and not is_last:
            return None
        if training.straggler is not None and on_slow is not None and rank == 0:
            on_slow(training.straggler)
        training.save(is_last=is_last)
    pipe.watch.stops_later = options.saving is not None and options.saving.asynchronous
    pipe.watch.progress.note("gathering what every rank recorded")

    first = len(steps) - len(traces)
    recorded = int(sum_over_ranks(_median(steps, first) if rank == 0 else 0.0))
    trace = traces[recorded - first]
    reports = gathered(rank_report(pipe.device, None if trace is None else trace.shifted(-offset), live))
    parts = {name: part for name, _, part in pipe.held() if part is not None}
    found = gathered((kept, parts)) if checking else None
    if rank != 0:
        return None
    losses = [loss for loss, _ in steps]
    return make_record(
        runnable.plan,
        reports,
        steps=steps,
        first_step=first_step,
        recorded_step=first_step + recorded,
        torch_version=torch.__version__,
        python_version=platform.python_version(),
        backend=dist.get_backend(),
        transport=pipe.transport,
        engine=options.engine,
        threads=torch.get_num_threads(),
        check=None
        if found is None
        else check_record(runnable, options, folders, found, losses=losses, scales=scales, device=pipe.device),
    )


def rank_report(device: torch.device, trace: RankTrace | None, peak_in_flight: dict[int, int]) -> RankReport:
    """What this rank reports after a run; `trace` is of the recorded step, in rank 0's clock, if there is one."""
    return RankReport(
        rank=dist.get_rank(),
        host=socket.gethostname(),
        device=device.type,
        events=() if trace is None else trace.events,
        sent={} if trace is None else trace.sent,
        arrived={} if trace is None else trace.arrived,
        peak_in_flight=peak_in_flight,
        peak_memory=peak_memory(device),
    )


def _median(steps: list[tuple[float, float]], first: int) -> int:
    """The step of median time among those from `first` on; step 0, which warms up, only if it is alone."""
    usable = range(max(first, 1), len(steps)) or range(first, len(steps))
    return median_step([StepRecord(step=step, loss=None, seconds=steps[step][1]) for step in usable])


def check_record(
    runnable: RunnablePlan,
    options: RunOptions,
    folders: Sequence[Path],
    found: list[tuple[list[Gradients], dict[str, Slice]]],
    *,
    losses: list[float],
    scales: list[Scaled],
    device: torch.device,
) -> CheckRecord:
    """Compare with the same training in this process alone."""
    plan = runnable.plan
    built = build_model(plan.model, folders=folders, seed=options.seed, precision=plan.dtype)
    batches = batches_for(built, options.data, global_batch=plan.global_batch, seed=options.seed)
    return compare_gradients(
        built,
        [batches(step) for step in range(options.steps)],
        sizes=runnable.sizes,
        optimizer=make_optimizer(plan.optimizer, list(built.module.parameters()), rate=options.learning_rate),
        found=[joined((kept[step], parts) for kept, parts in found) for step in range(options.steps)],
        losses=losses,
        device=device,
        autocast=autocast_dtype(plan.precision),
        scales=scales,
    )


def pipeline_options(options: RunOptions, watch: Watch | None) -> PipelineOptions:
    """How a rank of a run trains. The model is seeded where it is built."""
    return PipelineOptions(
        seed=None,
        engine=options.engine,
        transport=options.transport,
        device=options.device,
        compile=options.compiled,
        timeout=options.timeout,
        trace=options.trace,
        watch=watch,
    )


def peak_memory(device: torch.device) -> int | None:
    """On CUDA the most bytes that torch had allocated; on the CPU the most that were resident in this process.

    getrusage would count the parent's before exec, too.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        status = Path(f"/proc/{os.getpid()}/status").read_text(encoding="ascii")
    except OSError:
        return None
    lines = [line.split() for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(lines[0][1]) * 1024 if lines else None
