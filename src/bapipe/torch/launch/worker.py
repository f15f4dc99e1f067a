"""One rank of a run, as torchrun starts it: `torchrun --nproc-per-node 2 -m bapipe.torch.launch.worker PLAN`."""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":  # before torch, which takes seconds to import
    from bapipe.torch.health.parent_death import end_with_parent, told_parent

    end_with_parent(told_parent(sys.argv))

import torch
import torch.distributed as dist

from bapipe.errors import BaPipeError
from bapipe.records.plan import Plan, read_plan
from bapipe.records.run_record import RunRecord, write_run
from bapipe.torch.checkpoint.checkpoint_manifest import CheckpointError
from bapipe.torch.checkpoint.checkpoint_options import Saving
from bapipe.torch.comm import TRANSPORTS
from bapipe.torch.health.failure import (
    Failure,
    RunError,
    forget_notes,
    write_failure,
    write_finished,
)
from bapipe.torch.health.process_exit import print_failure
from bapipe.torch.health.rank_status import Progress, progress_file
from bapipe.torch.health.watchdog import Watch
from bapipe.torch.inputs.training_data import DATA
from bapipe.torch.launch.display import Display
from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.launch.train import TrainSettings, train
from bapipe.torch.launch.train_pipedream import train_pipedream
from bapipe.torch.runtime.plan_checks import (
    describe_need,
    missing_gpus,
    ranks_on_gpus,
    runnable_schedule,
    threads_per_rank,
)
from bapipe.torch.runtime.process_group import join
from bapipe.torch.stage.error_context import one_line

if TYPE_CHECKING:
    from bapipe.torch.checkpoint.checkpoints import Loaded

__all__ = ["CheckError", "main", "run_worker"]


_COMPARED = {
    "whole": "on the whole mini-batch",
    "outputs": "with one loss of the same micro-batches' outputs",
    "microbatches": "in the same micro-batches",
}


class CheckError(BaPipeError):
    """The run's gradients or losses are not those of one process."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run this rank to its end; why it failed is one line, on standard error or left for the launcher."""
    options = _options(argv)
    if not faulthandler.is_enabled():
        faulthandler.enable()  # a library that crashes says nothing itself
    rank = int(os.environ.get("RANK", "0"))
    progress = None if options.notes is None else Progress(progress_file(options.notes, rank))
    if options.notes is not None:
        forget_notes(options.notes, by=rank)
    try:
        run_worker(options, progress)
    except RunError as error:
        if not error.told:
            _report(options, error.failure, rank)
        return error.failure.code
    except Exception as error:
        code = 2 if isinstance(error, BaPipeError) and not isinstance(error, (CheckError, CheckpointError)) else 1
        rank = dist.get_rank() if dist.is_initialized() else rank
        where = "" if isinstance(error, BaPipeError) else f"rank {rank}"
        failure = Failure(rank=rank, by=rank, where=where, reason=one_line(error), code=code, at=time.time())
        _report(options, failure, rank)
        return code
    if options.notes is not None:
        write_finished(options.notes, by=rank)
    return 0


def _report(options: argparse.Namespace, failure: Failure, rank: int) -> None:
    if options.notes is None:
        print_failure(failure, rank)
    else:
        write_failure(failure, options.notes, by=rank)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    usual = RunOptions()
    parser = argparse.ArgumentParser(prog="bapipe.torch.launch.worker", description="One rank of a run.")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--steps", type=int, default=usual.steps)
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--learning-rate", type=float, default=usual.learning_rate)
    parser.add_argument("--timeout", type=float, default=usual.timeout, help="seconds to wait for another rank")
    parser.add_argument("--data", choices=DATA, default=usual.data)
    parser.add_argument("--transport", choices=TRANSPORTS, default=usual.transport)
    parser.add_argument("--device", help="cpu or cuda; default: as planned")
    parser.add_argument("--out", type=Path, help="where to write run.json")
    parser.add_argument("--check", action="store_true", help="compare with training in one process")
    parser.add_argument("--vertical-sync", action="store_true", help="PipeDream: one version for all stages")
    parser.add_argument("--json", action="store_true", help="a JSON object per step")
    parser.add_argument("--tensorboard", type=Path, help="folder to write TensorBoard's events into")
    parser.add_argument("--notes", type=Path, help="folder for the launcher's notes")
    parser.add_argument("--code", type=Path, help="another folder to look for the model's code in")
    parser.add_argument("--checkpoint", type=Path, help="folder to save the training into")
    parser.add_argument("--every", type=int, default=1, help="steps between checkpoints")
    parser.add_argument("--keep", type=int, default=2, help="checkpoints that stay")
    parser.add_argument("--async", dest="asynchronous", action="store_true", help="write while training goes on")
    parser.add_argument("--resume", action="store_true", help="go on from the last complete checkpoint")
    return parser.parse_args(argv)


def run_worker(options: argparse.Namespace, progress: Progress | None) -> None:
    """Join the process group, train, and on rank 0 say and write how it went."""
    plan = read_plan(options.plan)
    schedule = runnable_schedule(plan)
    if options.steps < 1:
        raise BaPipeError(f"a run needs at least 1 step, got {options.steps}; raise --steps")
    if len(ranks_on_gpus(plan, options.device)) == len(plan.ranks) and not torch.cuda.is_available():
        need = describe_need(plan, options.device)
        raise missing_gpus(need, torch.__version__, built=torch.backends.cuda.is_built())  # type: ignore[no-untyped-call]
    rank = join(plan, options.timeout)
    torch.set_num_threads(threads_per_rank(int(os.environ.get("LOCAL_WORLD_SIZE", len(plan.ranks)))))
    settings = TrainSettings(
        steps=options.steps,
        seed=options.seed,
        learning_rate=options.learning_rate,
        data=options.data,
        transport=options.transport,
        device=options.device,
        timeout=options.timeout,
        check=options.check,
        folders=(*([options.code] if options.code else []), options.plan.resolve().parent, Path.cwd()),
        vertical_sync=options.vertical_sync,
        saving=_saving(options),
    )
    watch = Watch(
        [schedule.stages_of(number) for number in range(len(plan.ranks))],
        timeout=options.timeout,
        progress=progress,
        report=lambda failure, by: _report(options, failure, by),
        signals=(signal.SIGTERM, signal.SIGHUP, signal.SIGINT),
    )
    display = _display(plan, options) if rank == 0 else None
    on_step = None if display is None else display.step
    unsaved: list[str] = []
    if schedule.flushes:
        record = train(
            plan,
            settings,
            watch=watch,
            on_step=on_step,
            on_load=None if display is None else lambda loaded: _loaded(loaded, options, display),
            on_unsaved=unsaved.append,
        )
    else:
        record = train_pipedream(plan, settings, watch=watch, on_step=on_step)
    dist.destroy_process_group()
    if record is not None and display is not None:
        display.close()
        _finish(record, options.out, display)
    if unsaved:
        raise CheckpointError(f"all steps are trained, but {unsaved[0]}")


def _saving(options: argparse.Namespace) -> Saving | None:
    """A rank that torchrun has started again goes on from the last checkpoint, whatever it was first told."""
    if options.checkpoint is None:
        return None
    return Saving(
        folder=options.checkpoint,
        every=options.every,
        keep=options.keep,
        asynchronous=options.asynchronous,
        resume=options.resume or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0",
    )


def _loaded(loaded: Loaded, options: argparse.Namespace, display: Display) -> None:
    text = f"goes on from {loaded.path}, after {loaded.step} steps"
    if loaded.step >= options.steps:
        text = f"{loaded.path} has all {loaded.step} steps; nothing is left to train"
    elif options.check:
        text += "; gradients are not compared, as not all steps run here"
    display.say(text, checkpoint=str(loaded.path), steps=loaded.step)


def _display(plan: Plan, options: argparse.Namespace) -> Display:
    return Display(plan, options.steps, as_json=options.json, tensorboard=options.tensorboard)


def _finish(record: RunRecord, out: Path | None, display: Display) -> None:
    if out is not None:
        write_run(record, out)
        display.say(f"wrote {out}", wrote=str(out))
    check = record.check
    if check is None:
        return
    how = "" if check.compared is None else f" {_COMPARED[check.compared]}"
    found = (
        f"gradients differ from one process{how} by at most {check.gradient_difference:.1e} ({check.parameter}), "
        f"losses by {check.loss_difference:.1e}; {check.tolerance:.0e} is allowed"
    )
    if not check.passed:
        raise CheckError(found)
    display.say(
        found,
        check={
            "gradient_difference": check.gradient_difference,
            "parameter": check.parameter,
            "loss_difference": check.loss_difference,
            "tolerance": check.tolerance,
            "compared": check.compared,
        },
    )


if __name__ == "__main__":
    status = main()
    # A rank whose peer is gone still has receives posted, and waiting for them at exit could take for ever.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
