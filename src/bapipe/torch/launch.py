"""Starts a run on this machine: torchrun with one process per rank, and one line if it fails. Imports no torch."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bapipe.errors import BaPipeError
from bapipe.plan import read_plan
from bapipe.torch.failure import explain
from bapipe.torch.support import runnable_schedule, stage_of, threads_per_rank

__all__ = ["launch"]

_MARK = "\x1f"
"""torchrun puts this before what a rank writes on standard error, to tell it from what torchrun itself writes"""


def launch(
    plan_path: str | Path,
    *,
    steps: int = 3,
    out: str | Path | None = None,
    check: bool = False,
    seed: int = 0,
    learning_rate: float = 0.01,
    timeout: float = 300.0,
) -> int:
    """Run the plan and return the exit code: 0, 1 where a rank or the check failed, 2 where input was refused.

    The ranks' output goes to this process's own. What makes the run fail is printed on standard error as one line
    that names rank, stage and action. All ranks run on this machine, whatever nodes the cluster has.
    """
    if importlib.util.find_spec("torch") is None:
        raise BaPipeError("running a plan needs torch, which is not installed; pip install 'bapipe[torch]'")
    plan = read_plan(plan_path)
    schedule = runnable_schedule(plan)
    if steps < 1:
        raise BaPipeError(f"a run needs at least 1 step, got {steps}; raise --steps")
    if not timeout > 0:
        raise BaPipeError(f"the timeout must be more than 0 s, got {timeout:g}; raise --timeout")
    if out is not None and not Path(out).resolve().parent.is_dir():
        raise BaPipeError(f"{out} is in a folder that does not exist; make it first")
    ranks = schedule.num_ranks
    with tempfile.TemporaryDirectory(prefix="bapipe-run-") as folder:
        worker = ["-m", "bapipe.torch.worker", str(plan_path), "--steps", str(steps), "--seed", str(seed)]
        worker += ["--learning-rate", str(learning_rate), "--timeout", str(timeout), "--progress", folder]
        worker += ["--check"] if check else []
        worker += [] if out is None else ["--out", str(out)]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        torchrun += [
            "--nproc-per-node",
            str(ranks),
            "--monitor-interval",
            "0.5",
            "--tee",
            "2",
            "--log-dir",
            folder,
        ]
        code, summary = _run([*torchrun, *worker], _environment(ranks))
        if code == 0:
            return 0
        stages = [stage_of(schedule, rank) for rank in range(ranks)]
        line, code = explain(Path(folder), stages=stages, summary=summary, code=code)
    print(f"bapipe: {line}", file=sys.stderr)
    return code


def _environment(ranks: int) -> dict[str, str]:
    ours = {
        "OMP_NUM_THREADS": str(threads_per_rank(ranks)),
    }
    if sys.platform == "linux":
        ours["GLOO_SOCKET_IFNAME"] = "lo"
    return {**ours, **os.environ, "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": f"{_MARK}rank ${{rank}}: "}


def _run(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Run torchrun to its end; what ranks write on standard error is passed on, what torchrun writes returned."""
    own: list[str] = []
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, errors="replace"
    ) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if line.startswith(_MARK):
                    print(line.removeprefix(_MARK), end="", file=sys.stderr, flush=True)
                else:
                    own.append(line)
            process.wait()
        except BaseException:
            process.terminate()
            raise
    return process.returncode, "".join(own)
