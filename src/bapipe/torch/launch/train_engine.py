"""A whole run of a plan that torch's DDP or FSDP2 trains, on one rank: build, train, and report to rank 0."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from bapipe.errors import BaPipeError
from bapipe.records.run_record import RunRecord, StepRecord
from bapipe.torch.comm.rank_agreement import gathered, max_over_ranks
from bapipe.torch.device.take_device import take_device
from bapipe.torch.health.watchdog import Watch
from bapipe.torch.inputs.build_model import build_model
from bapipe.torch.inputs.make_optimizer import make_optimizer
from bapipe.torch.inputs.training_data import batches_for
from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.launch.run_report import make_record, median_step
from bapipe.torch.launch.train import OnStep, check_record, rank_report
from bapipe.torch.runtime.plan_checks import RunnablePlan
from bapipe.torch.runtime.process_group import device_of
from bapipe.torch.runtime.torch_engines import TorchEngine
from bapipe.torch.verify.gradient_check import Gradients, Scaled

__all__ = ["train_engine"]


def train_engine(
    runnable: RunnablePlan,
    options: RunOptions,
    *,
    folders: Sequence[Path] = (),
    watch: Watch,
    on_step: OnStep | None = None,
) -> RunRecord | None:
    """Run the plan in the process group that is there; rank 0 returns the record, the others None.

    Nothing is traced within a step, so that steps have no bubble and the record has no timeline.
    """
    plan, rank = runnable.plan, dist.get_rank()
    device = device_of(plan, options.device)
    take_device(device)
    built = build_model(plan.model, folders=folders, seed=options.seed, precision=plan.dtype)
    watch.progress.note("preparing the model")
    engine = TorchEngine(built, runnable, device, transport=options.transport, timeout=options.timeout)
    if options.check and engine.draws:
        raise BaPipeError(
            f"{plan.model.name} draws random numbers, which {plan.engine} does not draw as one process does; "
            "leave --check out, or plan with --strategy dp"
        )
    batches = batches_for(built, options.data, global_batch=plan.global_batch, seed=options.seed)
    optimizer = make_optimizer(plan.optimizer, engine.parameters, rate=options.learning_rate)
    steps: list[tuple[float, float]] = []
    kept: list[Gradients] = []
    with watch.guard():
        for step in range(options.steps):
            batch = batches(step)
            watch.progress.begin(step)
            with watch.meeting("ready"):
                max_over_ranks(0.0)
            start = time.perf_counter()
            loss = engine.step(*batch)
            if optimizer is not None:
                optimizer.step()
            with watch.meeting("done"):
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                max_over_ranks(0.0)
            steps.append((loss, time.perf_counter() - start))
            if options.check:
                kept.append(engine.gradients())
            if on_step is not None and rank == 0:
                on_step(StepRecord(step=step, loss=loss, seconds=steps[-1][1]), None)
        watch.progress.note("gathering what every rank recorded")
        reports = gathered(rank_report(device, None, {0: 1}))
    watch.close()
    if rank != 0:
        return None
    usable = [StepRecord(step=step, loss=None, seconds=own[1]) for step, own in enumerate(steps)]
    check = None
    if options.check:
        check = check_record(
            runnable,
            options,
            folders,
            [([*kept], {})],
            losses=[loss for loss, _ in steps],
            scales=[Scaled()] * len(steps),
            device=device,
        )
    return make_record(
        plan,
        reports,
        steps=steps,
        recorded_step=median_step(usable[1:] or usable),
        torch_version=torch.__version__,
        python_version=platform.python_version(),
        backend=engine.backend,
        transport=engine.backend,
        threads=torch.get_num_threads(),
        check=check,
    )
