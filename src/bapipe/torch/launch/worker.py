"""One rank of a run, as `bapipe run` or torchrun starts it: `-m bapipe.torch.launch.worker PLAN OPTIONS`."""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if __name__ == "__main__":  # before torch, which takes seconds to import
    from bapipe.torch.health.parent_death import end_with_parent, noted_parent
    from bapipe.torch.health.start_up import begin_loading

    end_with_parent(noted_parent(sys.argv))
    begin_loading()

import torch
import torch.distributed as dist

from bapipe.errors import BaPipeError
from bapipe.records.plan import Plan, read_plan
from bapipe.records.run_record import RunRecord, write_run
from bapipe.torch.capturing.torch_internals import load_tracer
from bapipe.torch.checkpoint.checkpoint_manifest import CheckpointError
from bapipe.torch.device.cpu_heap import keep_heap
from bapipe.torch.health.failure import (
    Failure,
    RunError,
    forget_notes,
    write_failure,
    write_finished,
)
from bapipe.torch.health.process_exit import leave, print_failure
from bapipe.torch.health.rank_status import Progress, progress_file
from bapipe.torch.health.start_up import end_loading
from bapipe.torch.health.stragglers import Straggler
from bapipe.torch.health.watchdog import Watch
from bapipe.torch.launch.display import Display
from bapipe.torch.launch.log_lines import print_log
from bapipe.torch.launch.rank_failure import CheckError, failure_of
from bapipe.torch.launch.run_options import RunOptions, parse_options
from bapipe.torch.launch.step_loggers import make_logger
from bapipe.torch.launch.train import train
from bapipe.torch.launch.train_engine import train_engine
from bapipe.torch.launch.train_pipedream import train_pipedream
from bapipe.torch.runtime.plan_checks import (
    RunnablePlan,
    check_plan,
    describe_need,
    missing_gpus,
    ranks_on_gpus,
    threads_of,
    trusted_plan,
)
from bapipe.torch.runtime.process_group import join, planned_rank
from bapipe.torch.runtime.rank_slice import take_slice

if TYPE_CHECKING:
    from bapipe.torch.checkpoint.checkpoints import Loaded

__all__ = ["RankArguments", "main", "run_worker"]


_OFF = 0.15
"""share by which a run's steps may differ from the prediction without a word"""
_JUDGED = 3
"""steps after the first by which that is judged"""
_COMPARED = {
    "whole": "on the whole global batch",
    "outputs": "with one loss of the same micro-batches' outputs",
    "microbatches": "in the same micro-batches",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankArguments:
    """What a rank is started with."""

    plan: Path
    """the plan's file"""
    options: RunOptions
    """of the run, the same on every rank"""
    notes: Path | None
    """the launcher's folder for what ranks leave it; None: no launcher has started this rank"""
    code: Path | None
    """another folder to look for the model's code in"""
    leaves_slow: bool = False
    """whether the run ends, saved, when a rank has become slow, for the launcher to plan again"""

    @property
    def folders(self) -> tuple[Path, ...]:
        """Where to look for the model's code first."""
        return (*([self.code] if self.code else []), self.plan.resolve().parent, Path.cwd())


def main(argv: Sequence[str] | None = None) -> int:
    """Run this rank to its end; why it failed is one line, on standard error or left for the launcher."""
    rank = int(os.environ.get("RANK", "0"))
    try:
        arguments = _arguments(argv)
    except BaPipeError as error:
        print_failure(Failure(rank=rank, by=rank, where="", reason=str(error), code=2, at=time.time()), rank)
        return 2
    if not faulthandler.is_enabled():
        faulthandler.enable()  # a library that crashes says nothing itself
    progress = None if arguments.notes is None else Progress(progress_file(arguments.notes, rank))
    if arguments.notes is not None:
        forget_notes(arguments.notes, by=rank)
    try:
        run_worker(arguments, progress)
    except RunError as error:
        if not error.reported:
            _report(arguments, error.failure, rank)
        return error.failure.code
    except BaseException as error:
        failure = failure_of(error, rank, progress)
        _report(arguments, failure, failure.by)
        return failure.code
    if arguments.notes is not None:
        write_finished(arguments.notes, by=rank)
    return 0


def _report(arguments: RankArguments, failure: Failure, rank: int) -> None:
    if arguments.notes is None:
        print_failure(failure, rank)
    else:
        write_failure(failure, arguments.notes, by=rank)


def _arguments(argv: Sequence[str] | None) -> RankArguments:
    parser = argparse.ArgumentParser(prog="bapipe.torch.launch.worker", description="One rank of a run.")
    parser.add_argument("plan", type=Path)
    parser.add_argument("options", nargs="?", default="{}", help="RunOptions, as JSON")
    parser.add_argument("--notes", type=Path, help="folder for the launcher's notes")
    parser.add_argument("--code", type=Path, help="another folder to look for the model's code in")
    parser.add_argument("--leave-slow", action="store_true", help="end when a rank has become slow")
    read = parser.parse_args(argv)
    options = parse_options(read.options)
    return RankArguments(
        plan=read.plan,
        options=_resumed(options),
        notes=read.notes,
        code=read.code,
        leaves_slow=read.leave_slow,
    )


def _resumed(options: RunOptions) -> RunOptions:
    """A rank that torchrun has started again goes on from the last checkpoint, whatever the options were."""
    if options.saving is None or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return options
    return replace(options, saving=options.saving.resumed())


def _read_plan(arguments: RankArguments) -> RunnablePlan:
    """The launcher has checked the plan; a rank that no launcher started checks it itself."""
    plan = read_plan(arguments.plan)
    return check_plan(plan) if arguments.notes is None else trusted_plan(plan)


def run_worker(arguments: RankArguments, progress: Progress | None) -> None:
    """Join the process group, train, and on rank 0 say and write how it went."""
    runnable, options = _read_plan(arguments), arguments.options
    plan = runnable.plan
    take_slice(plan, planned_rank(plan), options.device)
    if len(ranks_on_gpus(plan, options.device)) == len(plan.ranks) and not torch.cuda.is_available():
        need = describe_need(plan, options.device)
        raise missing_gpus(need, torch.__version__, built=torch.backends.cuda.is_built())  # type: ignore[no-untyped-call]
    load_tracer().join()
    end_loading()
    rank = join(plan, options.timeout)
    torch.set_num_threads(threads_of(plan))
    if len(ranks_on_gpus(plan, options.device)) < len(plan.ranks):
        keep_heap()
    display = _display(plan, options) if rank == 0 else None
    print_log(None if display is None else display.progress)
    watch = Watch(
        runnable.stages_by_rank(),
        timeout=options.timeout,
        progress=progress,
        report=lambda failure, by: _report(arguments, failure, by),
        signals=(signal.SIGTERM, signal.SIGHUP, signal.SIGINT),
    )
    on_step = None if display is None else display.step
    unsaved: list[str] = []
    if plan.engine != "bapipe":
        record = train_engine(runnable, options, folders=arguments.folders, watch=watch, on_step=on_step)
    elif runnable.schedule.flushes:
        record = train(
            runnable,
            options,
            folders=arguments.folders,
            watch=watch,
            on_step=on_step,
            on_load=None if display is None else lambda loaded: _loaded(loaded, options, display),
            on_straggler=None if display is None else lambda found: _straggler(found, display),
            on_unsaved=unsaved.append,
            leaves_slow=arguments.leaves_slow,
        )
    else:
        record = train_pipedream(runnable, options, folders=arguments.folders, watch=watch, on_step=on_step)
    dist.destroy_process_group()
    if record is not None and display is not None:
        display.close()
        _finish(record, options.out, display)
        _offer(record, plan, options, display)
    if unsaved:
        raise CheckpointError(f"all steps are trained, but {unsaved[0]}")


def _offer(record: RunRecord, plan: Plan, options: RunOptions, display: Display) -> None:
    """Where the prediction was off, say how to learn from the run."""
    steps = [step.seconds for step in record.steps[1:]]
    if options.out is None or not record.events or len(steps) < _JUDGED or options.as_json:
        return
    off = median(steps) / plan.prediction.time - 1
    if abs(off) > _OFF:
        display.say(
            f"a step took {1 + off:.2f}x what was predicted: bapipe compare PLAN {options.out} --profile PROFILE "
            "--recalibrate OUT corrects the profile by this run"
        )


def _straggler(found: Straggler, display: Display) -> None:
    figures = {**asdict(found), "factor": found.factor}
    display.say(found.line, straggler=figures)


def _loaded(loaded: Loaded, options: RunOptions, display: Display) -> None:
    text = f"goes on from {loaded.path}, after {loaded.step} steps"
    if loaded.step >= options.steps:
        text = f"{loaded.path} has all {loaded.step} steps; nothing is left to train"
    elif options.check:
        text += "; gradients are not compared, as not all steps run here"
    if isinstance(loaded.data, int) and loaded.data != loaded.step:
        text += f"; its data stood at {loaded.data}, this run's are at global batch {loaded.step}"
    display.say(text, checkpoint=str(loaded.path), steps=loaded.step)


def _display(plan: Plan, options: RunOptions) -> Display:
    words = [*options.log, *([] if options.tensorboard is None else [f"tensorboard:{options.tensorboard}"])]
    return Display(plan, options.steps, as_json=options.as_json, loggers=[make_logger(word) for word in words])


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
    leave(status)
