"""A whole run of a PipeDream plan on one rank: build, keep its stage, train without a pause, and record it."""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bapipe.records.run_record import CheckRecord, RunRecord, StepRecord
from bapipe.torch.capturing.stage_module import Slice
from bapipe.torch.comm.rank_agreement import clock_offset, gathered, machine_name, sum_over_ranks
from bapipe.torch.health.watchdog import Watch
from bapipe.torch.inputs.build_model import build_model
from bapipe.torch.inputs.make_optimizer import make_optimizer
from bapipe.torch.inputs.training_data import Batches, batches_for
from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.launch.run_report import make_record, median_step
from bapipe.torch.launch.train import OnStep, pipeline_options, rank_report
from bapipe.torch.pipedream.async_pipeline import PipeDream
from bapipe.torch.pipedream.async_run import EndlessTrace
from bapipe.torch.runtime.executor import RankTrace
from bapipe.torch.runtime.plan_checks import RunnablePlan
from bapipe.torch.stage.loss import loss_of_step
from bapipe.torch.verify.gradient_check import Gradients, gradients
from bapipe.torch.verify.stale_check import Holding, compare_stale

__all__ = ["train_pipedream"]

Found = dict[int, tuple[Gradients, dict[str, Slice]]]
"""optimizer step -> this rank's gradients, and of which it has a part only"""
_AHEAD = 4
"""global batches that are made before a run begins"""


def train_pipedream(
    runnable: RunnablePlan,
    options: RunOptions,
    *,
    folders: Sequence[Path] = (),
    watch: Watch | None = None,
    on_step: OnStep | None = None,
) -> RunRecord | None:
    """Run the plan in the process group that is there; rank 0 returns the record, the others None.

    A step is one of the plan's global batches, M optimizer steps; its seconds are those from the last one of the
    one before on rank 0 to its own: the first has the filling of the pipeline in it, the others are M steady
    periods. `on_step` is called on rank 0 after every step, with its bubble.
    """
    plan = runnable.plan
    built = build_model(plan.model, folders=folders, seed=options.seed, precision=plan.dtype)
    pipe = PipeDream(
        lambda: (built.module, built.args, built.kwargs),
        runnable,
        built.loss,
        vertical_sync=options.vertical_sync,
        options=pipeline_options(options, watch),
    )
    batches = batches_for(built, options.data, global_batch=plan.global_batch, seed=options.seed)
    optimizer = make_optimizer(plan.optimizer, list(pipe.parameters()), rate=options.learning_rate)
    kept: Found = {}
    parts = {name: part for name, _, part in pipe.held() if part is not None}
    count = plan.microbatches

    def keep(update: int) -> None:
        if (update + 1) % count == 0:
            kept[update] = (gradients(pipe.named_parameters()), parts)

    def report(step: int, loss: float, seconds: float, bubble: float | None) -> None:
        if on_step is not None:
            on_step(StepRecord(step=step, loss=loss, seconds=seconds), bubble)

    offset = clock_offset(machine_name())
    trace = pipe.train(
        _made_ahead(batches, options.steps),
        optimizer,
        steps=options.steps,
        on_update=keep if options.check else None,
        on_step=report,
    )
    with pipe.watch.guard():
        record = _record(runnable, options, folders, _Ran(pipe, trace, kept, offset))
    pipe.close()
    return record


def _made_ahead(batches: Batches, steps: int) -> Iterator[tuple[Any, Any]]:
    """The global batches, the first few made now: there is no pause in which to make them without waiting."""
    ready = deque(batches(step) for step in range(min(steps, _AHEAD)))

    def in_turn() -> Iterator[tuple[Any, Any]]:
        while ready:
            yield ready.popleft()
        yield from (batches(step) for step in range(_AHEAD, steps))

    return in_turn()


class _Ran(NamedTuple):
    """What a rank has after its last optimizer step."""

    pipe: PipeDream
    trace: EndlessTrace
    kept: Found
    offset: float
    """of this rank's clock"""


def _record(runnable: RunnablePlan, options: RunOptions, folders: Sequence[Path], ran: _Ran) -> RunRecord | None:
    plan, rank = runnable.plan, dist.get_rank()
    pipe, trace, kept, offset = ran
    pipe.watch.progress.note("gathering what every rank recorded")
    seconds = [end - start for start, end in zip((trace.start, *trace.ends), trace.ends, strict=False)]
    recorded = int(sum_over_ranks(_median(seconds, trace) if rank == 0 else 0.0))
    own = _traced(trace, recorded, offset) if options.trace else None
    reports = gathered(rank_report(pipe.device, own, {pipe.stage: trace.peak_in_flight}))
    versions = gathered(trace.weight_versions)
    found = gathered(kept) if options.check else None
    if rank != 0:
        return None
    count = plan.microbatches
    losses = [
        loss_of_step(trace.losses[first : first + count], trace.weights[first : first + count])
        for first in range(0, len(trace.losses), count)
    ]
    record = make_record(
        plan,
        reports,
        steps=list(zip(losses, seconds, strict=True)),
        recorded_step=recorded,
        torch_version=torch.__version__,
        python_version=platform.python_version(),
        backend=dist.get_backend(),
        transport=pipe.transport,
        threads=torch.get_num_threads(),
        check=None if found is None else _check(runnable, options, folders, pipe, found, trace.losses),
    )
    # What a rank did between two actions of a step was often an action of another step, which is not here: who
    # waited for which transfer cannot be known from one step alone.
    return replace(record, transfers=None, weight_versions=tuple(versions))


def _traced(trace: EndlessTrace, step: int, offset: float) -> RankTrace:
    """One step's actions; what was sent when cannot be said of one step alone."""
    return RankTrace(events=trace.events[step], sent={}, arrived={}, peak_in_flight={}).shifted(-offset)


def _median(seconds: list[float], trace: EndlessTrace) -> int:
    """The step of median time of those that are traced, or of all; the first, which fills the pipeline, and the
    last, which drains it, only where there are no others."""
    known = sorted(trace.events) or list(range(len(seconds)))
    inner = [step for step in known if 0 < step < len(seconds) - 1]
    usable = inner or [step for step in known if step > 0] or known
    return median_step([StepRecord(step=step, loss=None, seconds=seconds[step]) for step in usable])


def _check(
    runnable: RunnablePlan,
    options: RunOptions,
    folders: Sequence[Path],
    pipe: PipeDream,
    found: list[Found],
    losses: tuple[float, ...],
) -> CheckRecord:
    """Compare with the same stale gradients in this process alone."""
    plan = runnable.plan
    built = build_model(plan.model, folders=folders, seed=options.seed, precision=plan.dtype)
    batches = batches_for(built, options.data, global_batch=plan.global_batch, seed=options.seed)
    held: dict[str, list[Holding]] = {}
    by_update: dict[int, list[tuple[Gradients, dict[str, Slice]]]] = {}
    for rank, updates in enumerate(found):
        for update, (own, parts) in updates.items():
            by_update.setdefault(update, []).append((own, parts))
        own, parts = next(iter(updates.values()))
        for name in own:
            held.setdefault(name, []).append(Holding(lag=pipe.lag_of(rank), part=parts.get(name)))
    return compare_stale(
        built,
        [batches(step) for step in range(options.steps)],
        sizes=runnable.sizes,
        held=held,
        optimizer=make_optimizer(plan.optimizer, list(built.module.parameters()), rate=options.learning_rate),
        found=by_update,
        losses=losses,
        device=pipe.device,
    )
