"""Ranks that are forked from one process, so that models are captured once, and run one case after the other."""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quick_script import QUICK_SCRIPT

__all__ = ["TIMEOUT", "fork_ranks", "read_results", "run_cases", "run_own_cases", "start"]

HELPERS = Path(__file__).resolve().parents[1] / "helpers"
TIMEOUT = datetime.timedelta(seconds=300)
"""for ranks that wait while others run cases without them"""


def start(worker: Path, folder: Path, *options: str, seconds: float) -> None:
    """Run a worker script on a folder to its end; what it writes is shown if it fails."""
    path = os.pathsep.join(filter(None, (str(HELPERS), os.environ.get("PYTHONPATH", ""))))
    done = subprocess.run(
        [sys.executable, QUICK_SCRIPT, str(worker), str(folder), *options],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]


def run_cases(folder: Path, worlds: Sequence[int], run: Callable[[int], Any]) -> int:
    """Fork as many ranks as the largest case has and let the first `worlds[i]` of them run case i.

    What `run(i)` returns on a rank, or the error as {"error": …}, goes to a file; a case that fails does not stop
    the others. Returns the exit code.
    """
    return fork_ranks(max(worlds), lambda rank: run_own_cases(folder, rank, worlds, run))


def fork_ranks(count: int, run: Callable[[int], None]) -> int:
    """Run `run(rank)` in so many children; returns the exit code, 1 if any failed."""
    gc.collect()
    gc.freeze()
    sys.stdout.flush()
    children = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            gc.enable()
            try:
                run(rank)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)


def run_own_cases(folder: Path, rank: int, worlds: Sequence[int], run: Callable[[int], Any]) -> None:
    """Run those of the cases that have this rank, as `run_cases` says."""
    import torch.distributed as dist

    for index, world in enumerate(worlds):
        if rank >= world:
            continue
        try:
            store = f"file://{folder / f'store-{index}'}"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=TIMEOUT)
            result = run(index)
        except Exception:
            result = {"error": traceback.format_exc()}
        finally:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        gc.collect()
        (folder / f"result-{index}-{rank}.json").write_text(json.dumps(result), encoding="ascii")


def read_results(folder: Path, worlds: Sequence[int]) -> list[list[Any]]:
    """Of every case what each of its ranks returned."""
    return [
        [json.loads((folder / f"result-{index}-{rank}.json").read_text(encoding="ascii")) for rank in range(world)]
        for index, world in enumerate(worlds)
    ]
