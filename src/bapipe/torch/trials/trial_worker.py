"""One rank of trials: several plans of one model, one after another.

The model is built and captured once. Each plan trains at a learning rate of 0, so that all see the same weights.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

if __name__ == "__main__":  # before torch, which takes seconds to import
    from bapipe.torch.health.parent_death import end_with_parent, noted_parent
    from bapipe.torch.health.start_up import begin_loading

    end_with_parent(noted_parent(sys.argv))
    begin_loading()

import torch
import torch.distributed as dist

from bapipe.records.plan import Plan
from bapipe.records.run_record import write_run
from bapipe.torch.capturing import capture
from bapipe.torch.capturing.torch_internals import load_tracer
from bapipe.torch.device.cpu_heap import keep_heap
from bapipe.torch.health.failure import RunError, write_failure, write_finished
from bapipe.torch.health.start_up import end_loading
from bapipe.torch.inputs.build_model import build_model
from bapipe.torch.launch.log_lines import print_log
from bapipe.torch.launch.rank_failure import failure_of
from bapipe.torch.launch.run_options import RunOptions, parse_options
from bapipe.torch.launch.train import PreparedModel, train
from bapipe.torch.runtime.plan_checks import ranks_on_gpus, threads_of, trusted_plan
from bapipe.torch.runtime.process_group import join, planned_rank
from bapipe.torch.runtime.rank_slice import take_slice
from bapipe.torch.trials.trial_record import read_jobs, result_file

__all__ = ["main"]


def main(
    argv: Sequence[str] | None = None,
    *,
    on_ready: Callable[[], None] | None = None,
    on_done: Callable[[], None] | None = None,
) -> int:
    """Run this rank to its end; why it failed is left for the process that started it."""
    parser = argparse.ArgumentParser(prog="bapipe.torch.trials.trial_worker", description="One rank of trials.")
    parser.add_argument("folder", type=Path, help="with trials.json; records go there")
    parser.add_argument("options", help="RunOptions, as JSON")
    parser.add_argument("--code", type=Path, required=True, help="folder to look for the model's code in")
    parser.add_argument("--notes", type=Path, required=True, help="folder for the launcher's notes")
    read = parser.parse_args(argv)
    rank = int(os.environ.get("RANK", "0"))
    try:
        _run_jobs(read.folder, parse_options(read.options), read.code, on_ready=on_ready, on_done=on_done)
    except RunError as error:
        if not error.reported:
            write_failure(error.failure, read.notes, by=rank)
        return error.failure.code
    except BaseException as error:
        failure = failure_of(error, rank, None)
        write_failure(failure, read.notes, by=rank)
        return failure.code
    write_finished(read.notes, by=rank)
    return 0


def _run_jobs(
    folder: Path,
    options: RunOptions,
    code: Path,
    *,
    on_ready: Callable[[], None] | None = None,
    on_done: Callable[[], None] | None = None,
) -> None:
    """Run the jobs of a folder; every rank calls `on_ready` before the first step of each, `on_done` after it."""
    jobs = read_jobs(folder)
    first = jobs[0][0]
    take_slice(first, planned_rank(first), options.device)
    load_tracer().join()
    end_loading()
    rank = join(first, options.timeout)
    torch.set_num_threads(threads_of(first))
    if len(ranks_on_gpus(first, options.device)) < len(first.ranks):
        keep_heap()
    print_log(None)
    prepared = _prepare(first, options, code)
    for number, (plan, steps, engine) in enumerate(jobs):
        own = replace(options, steps=steps, learning_rate=0.0, engine=engine)
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()  # of the plan before
        record = train(trusted_plan(plan), own, prepared=prepared, on_ready=on_ready)
        if on_done is not None:
            on_done()
        prepared.captured.module.to("cpu").zero_grad(set_to_none=True)
        if rank == 0 and record is not None:
            write_run(record, result_file(folder, number))
    dist.destroy_process_group()


def _prepare(plan: Plan, options: RunOptions, code: Path) -> PreparedModel:
    built = build_model(plan.model, folders=(code, Path.cwd()), seed=options.seed, precision=plan.dtype)
    captured = capture(built.module, built.args, built.kwargs, check=False)
    return PreparedModel(built=built, captured=captured)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
