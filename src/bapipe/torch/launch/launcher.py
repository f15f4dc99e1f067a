"""Starts a run on this machine: torchrun with one process per rank, and one line if it fails. Imports no torch."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bapipe.errors import BaPipeError
from bapipe.records.plan import Plan, read_plan
from bapipe.schedule.actions import Schedule
from bapipe.torch.health.failure import Failure, explain
from bapipe.torch.health.parent_death import write_parent
from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.launch.supervise import Ended, grace, supervise
from bapipe.torch.runtime.plan_checks import (
    describe_need,
    missing_gpus,
    ranks_on_gpus,
    runnable_schedule,
    threads_per_rank,
)

__all__ = ["attempt", "check_gpus", "check_run", "launch", "print_line", "start_script", "worker_arguments"]

_MARK = "\x1f"
"""torchrun puts this before what a rank writes on standard error, to tell it from what torchrun itself writes"""


def check_run(plan_path: str | Path, options: RunOptions) -> tuple[Plan, Schedule]:
    """Refuse, before any process starts, what cannot be run; the plan and the schedule of what can."""
    if importlib.util.find_spec("torch") is None:
        raise BaPipeError("running a plan needs torch, which is not installed; pip install 'bapipe[torch]'")
    plan = read_plan(plan_path)
    schedule = runnable_schedule(plan)
    if options.steps < 1:
        raise BaPipeError(f"a run needs at least 1 step, got {options.steps}; raise --steps")
    if not options.timeout > 0:
        raise BaPipeError(f"the timeout must be more than 0 s, got {options.timeout:g}; raise --timeout")
    if options.tensorboard is not None and importlib.util.find_spec("tensorboard") is None:
        raise BaPipeError("--tensorboard needs tensorboard, which is not installed; pip install tensorboard")
    return plan, schedule


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
    """What torchrun is given to start a rank of this run."""
    return ["-m", "bapipe.torch.launch.worker", str(plan_path), *options.arguments()]


def launch(plan_path: str | Path, options: RunOptions, *, restarts: int = 0) -> int:
    """Run the plan and return the exit code: 0, 1 where a rank or the check failed, 2 where input was refused.

    The ranks' output goes to this process's own. What makes the run fail is printed on standard error as one line
    that names rank, host, stage and action; of a rank that does not answer, with what every rank was at. All ranks
    run on this machine, whatever nodes the cluster has. With `restarts` all ranks are started again, so many times
    at most, when one fails; they go on from the last checkpoint.

    SIGTERM, SIGHUP and SIGINT stop the ranks, which first save themselves if the options say so (not at SIGINT);
    the process then ends by SystemExit with 128 + the signal's number, or by KeyboardInterrupt.
    """
    plan, schedule = check_run(plan_path, options)
    if options.out is not None and not Path(options.out).resolve().parent.is_dir():
        raise BaPipeError(f"{options.out} is in a folder that does not exist; make it first")
    if options.saving is not None:
        options.saving.check(comparing=options.check)
        if not schedule.flushes:
            raise BaPipeError(
                "a pipedream run keeps several versions of its weights, which are not saved; leave "
                "--checkpoint out"
            )
    check_gpus(plan, options.device)
    failure = attempt(plan_path, worker_arguments(plan_path, options), restarts=restarts)
    if failure is None:
        return 0
    print_line(failure)
    return failure.code


def attempt(plan_path: str | Path, arguments: Sequence[str], *, restarts: int = 0) -> Failure | None:
    """Start the ranks of a plan with these arguments and wait; why it failed, or None.

    Where this process was told to stop by a signal it says so and raises, as `launch`.
    """
    schedule = runnable_schedule(read_plan(plan_path))
    ranks = schedule.num_ranks
    with tempfile.TemporaryDirectory(prefix="bapipe-run-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        logs = ["--tee", "2", "--log-dir", name]
        logs += ["--max-restarts", str(restarts)] if restarts else []
        ended = supervise(
            [*_torchrun(ranks), *logs, *arguments, "--notes", name],
            _environment(ranks),
            started=lambda process: write_parent(process, folder),
            keeps=_is_torchruns,
        )
        stages = [schedule.stages_of(rank) for rank in range(ranks)]
        failure = explain(folder, stages=stages, host=socket.gethostname(), summary=ended.output, code=ended.code)
    if ended.told is not None:
        _stop(ended, "" if failure is None or failure.code <= 128 else failure.line)
    return failure


def _stop(ended: Ended, said: str = "") -> None:
    """End this process as it was told to; `said` is what the ranks had to say."""
    assert ended.told is not None
    killed = f"; what had not ended after at most {grace():g} s was killed" if ended.killed else ""
    line = said or f"stopped by {ended.told.name}{killed}"
    print(f"bapipe: {line}", file=sys.stderr)
    if ended.told is signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + ended.told)


def print_line(failure: Failure) -> None:
    """Why a run failed, on standard error."""
    print(f"bapipe: {failure.line}", file=sys.stderr)
    if failure.table:
        print(failure.table, file=sys.stderr)


def start_script(ranks: int, program: Sequence[str]) -> int:
    """Start a user's own script on this machine, one process per rank, and return torchrun's exit code."""
    if not Path(program[0]).is_file():
        raise BaPipeError(f"there is no script {program[0]}; check the path")
    ended = supervise([*_torchrun(ranks), *program], _environment(ranks))
    if ended.told is not None:
        _stop(ended)
    return ended.code if ended.code >= 0 else 128 - ended.code


def _torchrun(ranks: int) -> list[str]:
    options = ["--standalone", "--local-addr", "127.0.0.1"]
    return [*options, "--nproc-per-node", str(ranks), "--monitor-interval", "0.5"]


def _environment(ranks: int) -> dict[str, str]:
    ours = {"OMP_NUM_THREADS": str(threads_per_rank(ranks))}
    if sys.platform == "linux":
        ours["GLOO_SOCKET_IFNAME"] = "lo"
    inherited = {name: value for name, value in os.environ.items() if name != "BAPIPE_NODE"}
    return {**ours, **inherited, "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": f"{_MARK}rank ${{rank}}: "}


def _is_torchruns(line: str) -> bool:
    """Whether a line on standard error is torchrun's own; what ranks write there is passed on."""
    if line.startswith(_MARK):
        print(line.removeprefix(_MARK), end="", file=sys.stderr, flush=True)
        return False
    return True
