"""Starts a run on this machine: one process per rank, and one line if it fails. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bapipe.errors import BaPipeError
from bapipe.io.files import check_output
from bapipe.records.plan import Plan, read_plan
from bapipe.torch.checkpoint.checkpoint_checks import check_saving
from bapipe.torch.checkpoint.checkpoint_folder import latest
from bapipe.torch.health.failure import Failure, explain
from bapipe.torch.launch.local_ranks import run_local, shared_folder
from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.launch.step_loggers import check_logger
from bapipe.torch.launch.supervise import Ended, grace
from bapipe.torch.runtime.engines import check_engine, check_torch_version
from bapipe.torch.runtime.plan_checks import (
    RunnablePlan,
    check_plan,
    describe_need,
    missing_gpus,
    ranks_on_gpus,
    threads_per_rank,
)

__all__ = [
    "attempt",
    "check_gpus",
    "check_here",
    "check_run",
    "launch",
    "print_line",
    "run_checked",
    "start_script",
    "worker_arguments",
]

_QUIET = {"TORCH_CPP_LOG_LEVEL": "FATAL"}
"""torch's own log of NCCL and gloo, which tells of a lost rank in stack traces of every other; the runtime has a
line for it"""
_LATER = 3.0
"""seconds after the timeout, at which ranks notice one that does not answer, in which the launcher leaves it to
them"""


def check_run(plan_path: str | Path, options: RunOptions) -> RunnablePlan:
    """Refuse, before any process starts, what cannot be run anywhere; the plan of what can."""
    if importlib.util.find_spec("torch") is None:
        raise BaPipeError("running a plan needs torch, which is not installed; pip install 'bapipe[torch]'")
    runnable = check_plan(read_plan(plan_path))
    check_engine(runnable.plan, runnable.schedule, options.engine, compiled=options.compiled)
    check_torch_version(options.engine, importlib.metadata.version("torch"))
    if options.tensorboard is not None and importlib.util.find_spec("tensorboard") is None:
        raise BaPipeError("--tensorboard needs tensorboard, which is not installed; pip install tensorboard")
    for word in options.log:
        check_logger(word)
    if options.saving is not None and runnable.plan.engine != "bapipe":
        raise BaPipeError(
            f"a run of {runnable.plan.engine} is not saved; leave --checkpoint out, or plan with --strategy dp"
        )
    if options.saving is not None and not runnable.schedule.flushes:
        raise BaPipeError(
            "a pipedream run keeps several versions of its weights, which are not saved; leave --checkpoint out"
        )
    return runnable


def check_here(runnable: RunnablePlan, options: RunOptions) -> None:
    """Refuse, before any process starts, what cannot be run on this machine: its system, folders and GPUs."""
    if sys.platform != "linux":
        raise BaPipeError(
            f"plans run on Linux, and this is {sys.platform}; take the plan to a Linux machine and run it there"
        )
    check_output(options.out)
    if options.saving is not None:
        check_saving(options.saving, comparing=options.check)
    check_gpus(runnable.plan, options.device)


def check_gpus(plan: Plan, device: str | None) -> None:
    """Refuse a run that needs a GPU on a machine where torch has none.

    Torch is asked in a process of its own, which takes a few seconds, and only where a GPU is needed. Where it
    does not answer, the ranks are left to complain.
    """
    if not ranks_on_gpus(plan, device):
        return
    question = (
        "import torch; built, there = torch.backends.cuda.is_built(), torch.cuda.is_available(); "
        "print(torch.__version__, int(built), int(there))"
    )
    try:
        answer = subprocess.run(
            [sys.executable, "-c", question], capture_output=True, text=True, timeout=60, check=True
        )
        version, built, there = answer.stdout.split()[-3:]
    except (OSError, subprocess.SubprocessError, ValueError):
        return
    if there != "1":
        raise missing_gpus(describe_need(plan, device), version, built=built == "1")


def worker_arguments(plan_path: str | Path, options: RunOptions) -> list[str]:
    """What Python, or torchrun, is given to start a rank of this run."""
    return ["-m", "bapipe.torch.launch.worker", str(plan_path), options.to_json()]


def launch(plan_path: str | Path, options: RunOptions, *, restarts: int = 0) -> int:
    """Run the plan and return the exit code: 0, 1 where a rank or the check failed, 2 where input was refused.

    The ranks' output goes to this process's own. What makes the run fail is printed on standard error as one line
    that names rank, host, stage and action; of a rank that does not answer, with what every rank was at. All ranks
    run on this machine, whatever nodes the cluster has. With `restarts` all ranks are started again, so many times
    at most, when one fails; a line says which and why, and they go on from the last checkpoint.

    SIGTERM, SIGHUP and SIGINT stop the ranks, which first save themselves if the options say so (not at SIGINT);
    the process then ends by SystemExit with 128 + the signal's number, or by KeyboardInterrupt.
    """
    runnable = check_run(plan_path, options)
    check_here(runnable, options)
    return run_checked(runnable, plan_path, options, restarts=restarts)


def run_checked(runnable: RunnablePlan, plan_path: str | Path, options: RunOptions, *, restarts: int = 0) -> int:
    """As `launch`, of what `check_run` and `check_here` have accepted."""
    done = 0
    while (
        failure := attempt(runnable, worker_arguments(plan_path, options), timeout=options.timeout)
    ) is not None:
        if done == restarts or not _may_pass(failure):
            print_line(failure)
            return failure.code
        done += 1
        if options.saving is not None:
            options = replace(options, saving=options.saving.resumed())
        print(f"bapipe: {failure.line}; {_restart(options, done, restarts)}", file=sys.stderr, flush=True)
    return 0


def _may_pass(failure: Failure) -> bool:
    """Whether another attempt may go better: input that was refused will be refused again."""
    return failure.code == 1


def _restart(options: RunOptions, number: int, restarts: int) -> str:
    found = None if options.saving is None else latest(options.saving.folder)
    start = "from the start" if found is None else f"from {found}"
    return f"restart {number} of {restarts}, {start}"


def attempt(runnable: RunnablePlan, arguments: Sequence[str], *, timeout: float) -> Failure | None:
    """Start the ranks of a plan with these arguments and wait; why it failed, or None.

    `timeout` is how long they wait for each other; where all of them are stopped, the launcher ends them a little
    later. Where a signal stops this process it says so and raises, as `launch`.
    """
    stages = runnable.stages_by_rank()
    with shared_folder() as folder:
        program = [*arguments, "--notes", str(folder)]
        ended = run_local(len(stages), program, folder, _environment(len(stages)), patience=timeout + _LATER)
        failure = explain(folder, stages=stages, host=socket.gethostname(), ends=ended.ranks)
    if ended.stopped_by is not None:
        _stop(ended, "" if failure is None or failure.code <= 128 else failure.line)
    return failure


def _stop(ended: Ended, said: str = "") -> None:
    """End this process as the signal asks; `said` is what the ranks had to say."""
    assert ended.stopped_by is not None
    killed = f"; what had not ended after at most {grace():g} s was killed" if ended.killed else ""
    line = said or f"stopped by {ended.stopped_by.name}{killed}"
    print(f"bapipe: {line}", file=sys.stderr)
    if ended.stopped_by is signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + ended.stopped_by)


def print_line(failure: Failure) -> None:
    """Why a run failed, on standard error."""
    print(f"bapipe: {failure.line}", file=sys.stderr)
    if failure.table:
        print(failure.table, file=sys.stderr)


def start_script(ranks: int, program: Sequence[str]) -> int:
    """Start a user's own script on this machine, one process per rank.

    Returns 0, or 1 where a rank failed, of which a line is printed.
    """
    if not Path(program[0]).is_file():
        raise BaPipeError(f"there is no script {program[0]}; check the path")
    with shared_folder() as folder:
        ended = run_local(ranks, program, folder, _environment(ranks), labelled=False)
    if ended.stopped_by is not None:
        _stop(ended)
    if not ended.failed:
        return 0
    first = next((end for end in ended.failed if not end.told), ended.failed[0])
    how = f"was killed by {first.killed_by}" if first.killed_by else f"ended with code {first.code}"
    print(f"bapipe: rank {first.rank} {how}", file=sys.stderr)
    return 1


def _environment(ranks: int) -> dict[str, str]:
    ours = {"OMP_NUM_THREADS": str(threads_per_rank(ranks)), **_QUIET}
    ours["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(1, (os.cpu_count() or 1) // ranks))
    inherited = {name: value for name, value in os.environ.items() if name != "BAPIPE_NODE"}
    return {**ours, **inherited}
