"""A whole run on one rank: build, keep one stage, train some mini-batches, and tell rank 0 how it went."""

from __future__ import annotations

import dataclasses
import os
import platform
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bapipe.plan import Plan
from bapipe.run_record import CheckRecord, RunRecord, StepRecord
from bapipe.torch.build import BuiltModel, build_model, make_optimizer
from bapipe.torch.check import Gradients, compare_gradients, gradients
from bapipe.torch.executor import StageExecutor, StepTrace, actions_of, connect
from bapipe.torch.failure import Progress
from bapipe.torch.gather import RankReport, make_record, median_step
from bapipe.torch.split import boundaries, check_model, stage_module
from bapipe.torch.support import lane_of, microbatch_sizes, runnable_schedule, stage_of
from bapipe.torch.transport import clock_offset, guarded, sum_over_ranks

__all__ = ["Settings", "StageTraining", "train"]

T = TypeVar("T")
_KEPT_STEPS = 9
"""of the last so many steps the one of median time is recorded"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to run a plan."""

    steps: int = 3
    """mini-batches"""
    seed: int = 0
    """of the weights; mini-batch s is made with seed + 1 + s"""
    learning_rate: float = 0.01
    check: bool = False
    """whether to compare with the same training in one process; every step's gradients are kept for it"""
    folders: tuple[Path, ...] = ()
    """where to look for the model's code first"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTraining:
    """This rank's stage, ready for its first step."""

    plan: Plan
    settings: Settings
    stage: int
    sizes: tuple[int, ...]
    """samples of each micro-batch"""
    built: BuiltModel
    """its module is this rank's stage alone"""
    executor: StageExecutor

    @classmethod
    def prepare(cls, plan: Plan, settings: Settings, *, rank: int, progress: Progress) -> StageTraining:
        """Build the model, keep this rank's stage of it, and connect it to its neighbours."""
        schedule = runnable_schedule(plan)
        stage, sizes = stage_of(schedule, rank), microbatch_sizes(plan)
        whole = build_model(plan.model, folders=settings.folders, seed=settings.seed)
        check_model(whole.module, plan.model, plan.stages)
        shapes = boundaries(whole.module, whole.args, whole.kwargs, sizes=sizes)
        own = plan.stages[stage]
        built = dataclasses.replace(whole, module=stage_module(whole.module, own))
        links = connect(
            schedule,
            stage,
            received=[shapes[size][own.first_layer - 1] for size in sizes] if stage > 0 else [],
            produced=[shapes[size][own.last_layer] for size in sizes],
        )
        executor = StageExecutor(
            built.module,
            actions_of(lane_of(schedule, rank)),
            links,
            rank=rank,
            weights=[size / plan.minibatch for size in sizes],
            loss=built.loss,
            optimizer=make_optimizer(plan.optimizer, built.module, rate=settings.learning_rate),
            on_action=lambda action: progress.note(f"action {action} of step {progress.step}"),
        )
        return cls(plan=plan, settings=settings, stage=stage, sizes=sizes, built=built, executor=executor)

    @property
    def module(self) -> nn.Module:
        return self.built.module

    def microbatches(self, step: int) -> tuple[tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
        """Inputs and targets of a step's micro-batches, for the stages that need them."""
        first, last = self.stage == 0, self.stage == len(self.plan.stages) - 1
        if not first and not last:
            return None, None
        data, target = _batch(self.built, self.plan, self.settings, step)
        sizes = list(self.sizes)
        return torch.split(data, sizes) if first else None, torch.split(target, sizes) if last else None


def _batch(built: BuiltModel, plan: Plan, settings: Settings, step: int) -> tuple[Tensor, Tensor]:
    return built.batch(settings.seed + 1 + step, plan.minibatch)


def train(
    plan: Plan,
    settings: Settings,
    *,
    progress: Progress,
    on_step: Callable[[StepRecord], None] | None = None,
) -> RunRecord | None:
    """Run the plan in the process group that is there; rank 0 returns the record, the others None.

    `on_step` is called on rank 0 after every step.
    """
    rank = dist.get_rank()
    training = StageTraining.prepare(plan, settings, rank=rank, progress=progress)
    offset = clock_offset(_machine())
    traces: deque[StepTrace] = deque(maxlen=_KEPT_STEPS)
    steps: list[tuple[float, float]] = []
    kept: list[Gradients] = []
    peak_live = 0
    for step in range(settings.steps):
        progress.begin(step)
        inputs, targets = training.microbatches(step)
        sum_over_ranks(0.0)
        start = time.perf_counter()
        trace = training.executor.run_step(inputs, targets)
        loss = sum_over_ranks(trace.loss)
        steps.append((loss, time.perf_counter() - start))
        traces.append(trace)
        peak_live = max(peak_live, trace.peak_live)
        if settings.check:
            kept.append(gradients(training.module))
        if on_step is not None and rank == 0:
            on_step(StepRecord(step=step, loss=loss, seconds=steps[-1][1]))
    progress.note("after the last step")

    first = len(steps) - len(traces)
    recorded = int(sum_over_ranks(_median(steps, first) if rank == 0 else 0.0))
    trace = traces[recorded - first]
    reports = _gathered(
        RankReport(
            rank=rank,
            stage=training.stage,
            host=socket.gethostname(),
            events=tuple((action, start - offset, end - offset) for action, start, end in trace.events),
            sent={action: (peer, at - offset) for action, (peer, at) in trace.sent.items()},
            arrived={action: at - offset for action, at in trace.arrived.items()},
            peak_live=peak_live,
            peak_memory=_peak_memory(),
        )
    )
    found = _gathered(kept) if settings.check else None
    if rank != 0:
        return None
    return make_record(
        plan,
        reports,
        steps=steps,
        recorded_step=recorded,
        torch_version=torch.__version__,
        python_version=platform.python_version(),
        backend=dist.get_backend(),
        threads=torch.get_num_threads(),
        check=None if found is None else _check(plan, settings, found, [loss for loss, _ in steps]),
    )


def _median(steps: list[tuple[float, float]], first: int) -> int:
    """The step of median time among those from `first` on; step 0, which warms up, only if it is alone."""
    usable = range(max(first, 1), len(steps)) or range(first, len(steps))
    return median_step([StepRecord(step=step, loss=None, seconds=steps[step][1]) for step in usable])


def _gathered(value: T) -> list[T]:
    """Every rank's value on rank 0; elsewhere an empty list."""
    rank = dist.get_rank()
    values: list[T | None] | None = [None] * dist.get_world_size() if rank == 0 else None
    with guarded(None):
        dist.gather_object(value, values)
    return [item for item in values or [] if item is not None]


def _check(plan: Plan, settings: Settings, found: list[list[Gradients]], losses: list[float]) -> CheckRecord:
    """Compare with the same training in this process alone."""
    built = build_model(plan.model, folders=settings.folders, seed=settings.seed)
    joined = [
        {name: value for rank in found for name, value in rank[step].items()} for step in range(settings.steps)
    ]
    return compare_gradients(
        built.module,
        [_batch(built, plan, settings, step) for step in range(settings.steps)],
        sizes=microbatch_sizes(plan),
        loss=built.loss,
        optimizer=make_optimizer(plan.optimizer, built.module, rate=settings.learning_rate),
        found=joined,
        losses=losses,
    )


def _machine() -> str:
    """The same on all ranks that share a clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _peak_memory() -> int | None:
    """Most bytes that were resident in this process. getrusage would count the parent's before exec, too."""
    try:
        status = Path(f"/proc/{os.getpid()}/status").read_text(encoding="ascii")
    except OSError:
        return None
    lines = [line.split() for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(lines[0][1]) * 1024 if lines else None
