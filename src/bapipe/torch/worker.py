"""One rank of a run, as torchrun starts it: `torchrun --nproc-per-node 2 -m bapipe.torch.worker plan.json`."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from bapipe.errors import BaPipeError
from bapipe.plan import Plan, read_plan
from bapipe.run_record import RunRecord, StepRecord, write_run
from bapipe.torch.executor import ActionError, one_line
from bapipe.torch.failure import Failure, Progress, write_failure
from bapipe.torch.support import runnable_schedule, threads_per_rank
from bapipe.torch.train import Settings, train
from bapipe.torch.transport import LinkError
from bapipe.units import format_seconds

__all__ = ["CheckError", "main", "run_worker"]


class CheckError(BaPipeError):
    """The run's gradients or losses are not those of one process."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run this rank to its end; a failure is one line, on standard error or left for the launcher."""
    options = _options(argv)
    rank = int(os.environ.get("RANK", "0"))
    progress = Progress(options.progress, rank)
    try:
        run_worker(options, progress)
    except Exception as error:
        failure = _failure(error, rank)
        if options.progress is not None:
            write_failure(failure, options.progress)
        else:
            alone = failure.whole or isinstance(error, ActionError)
            line = str(error) if alone else f"rank {rank}, {progress.current}: {failure.reason}"
            print(f"bapipe: {line}", file=sys.stderr)
        return failure.code
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bapipe.torch.worker", description="One rank of a run.")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds to wait for another rank")
    parser.add_argument("--out", type=Path, help="where to write run.json")
    parser.add_argument("--check", action="store_true", help="compare with training in one process")
    parser.add_argument("--progress", type=Path, help="folder for the launcher's notes")
    return parser.parse_args(argv)


def run_worker(options: argparse.Namespace, progress: Progress) -> None:
    """Join the process group, train, and on rank 0 say and write how it went."""
    plan = read_plan(options.plan)
    world = _world_size(plan)
    if options.steps < 1:
        raise BaPipeError(f"a run needs at least 1 step, got {options.steps}; raise --steps")
    torch.set_num_threads(threads_per_rank(int(os.environ.get("LOCAL_WORLD_SIZE", world))))
    settings = Settings(
        steps=options.steps,
        seed=options.seed,
        learning_rate=options.learning_rate,
        check=options.check,
        folders=(options.plan.resolve().parent, Path.cwd()),
    )
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=options.timeout))
    record = train(plan, settings, progress=progress, on_step=_print_step)
    dist.destroy_process_group()
    if record is not None:
        _finish(record, options.out)


def _world_size(plan: Plan) -> int:
    runnable_schedule(plan)
    needed, started = len(plan.ranks), int(os.environ.get("WORLD_SIZE", "1"))
    if started != needed:
        raise BaPipeError(
            f"the plan needs {needed} ranks, torchrun started {started}; start it with --nproc-per-node {needed} "
            "or use bapipe run"
        )
    return needed


def _print_step(step: StepRecord) -> None:
    print(f"step {step.step}  loss {step.loss:.6f}  {format_seconds(step.seconds)}", flush=True)


def _finish(record: RunRecord, out: Path | None) -> None:
    if out is not None:
        write_run(record, out)
        print(f"wrote {out}", flush=True)
    check = record.check
    if check is None:
        return
    found = (
        f"gradients differ from one process by at most {check.gradient_difference:.1e} ({check.parameter}), "
        f"losses by {check.loss_difference:.1e}; {check.tolerance:.0e} is allowed"
    )
    if not check.passed:
        raise CheckError(found)
    print(found, flush=True)


def _failure(error: Exception, rank: int) -> Failure:
    cause = error.cause if isinstance(error, ActionError) else error
    lost = isinstance(cause, LinkError)
    # What an action raises belongs to that action, whoever made the mistake; any other BaPipeError stands alone.
    whole = isinstance(error, BaPipeError) and not isinstance(error, (ActionError, LinkError))
    return Failure(
        rank=rank,
        reason=one_line(cause),
        whole=whole,
        code=2 if whole and not isinstance(error, CheckError) else 1,
        lost=lost,
        lost_rank=cause.peer if isinstance(cause, LinkError) else None,
        at=time.time(),
    )


if __name__ == "__main__":
    status = main()
    # A rank whose peer is gone still has receives posted, and waiting for them at exit could take for ever.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
