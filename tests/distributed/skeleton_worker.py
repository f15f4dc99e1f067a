"""One of a few processes that run many plans, so that each test need not start its own.

Usage: skeleton_worker.py FOLDER RANK. The folder holds a plan-<case>.json for each case; plans for fewer ranks
than there are processes are run by the first ones. For every case each rank leaves its gradients and counts what
is left of a mini-batch, and rank 0 leaves the record of a run with its check.
"""

from __future__ import annotations

import datetime
import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.plan import Plan, read_plan
from bapipe.run_record import write_run
from bapipe.torch.check import gradients
from bapipe.torch.failure import Progress
from bapipe.torch.train import Settings, StageTraining, train
from bapipe.torch.transport import clock_offset

STEPS = 3
SKEW = 1000.0


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    for path in sorted(folder.glob("plan-*.json")):
        plan, case = read_plan(path), path.stem.removeprefix("plan-")
        if rank >= len(plan.ranks):
            continue
        _join(folder / f"store-{case}", rank, len(plan.ranks))
        settings = Settings(steps=STEPS, check=True, learning_rate=0.05, folders=(Path.cwd(),))
        record = train(plan, settings, progress=Progress(None, rank))
        if record is not None:
            write_run(record, folder / f"run-{case}.json")
        _leave_gradients(plan, settings, rank, folder / f"left-{case}-{rank}.pt")
        dist.destroy_process_group()
    _join(folder / "store-clock", rank, 3)
    # Rank 1 has rank 0's machine; rank 2 another one, whose clock is ahead.
    ahead = SKEW if rank == 2 else 0.0
    offset = clock_offset("other" if rank == 2 else "same", clock=lambda: _now() + ahead)
    (folder / f"clock-{rank}.json").write_text(json.dumps(offset), encoding="ascii")
    dist.destroy_process_group()


def _now() -> float:
    return datetime.datetime.now().timestamp()


def _join(store: Path, rank: int, world: int) -> None:
    timeout = datetime.timedelta(seconds=30)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)


def _leave_gradients(plan: Plan, settings: Settings, rank: int, path: Path) -> None:
    training = StageTraining.prepare(plan, settings, rank=rank, progress=Progress(None, rank))
    # What was there before is left out of the count, which would take half a second otherwise.
    gc.collect()
    gc.freeze()
    found, live, tensors = [], [], []
    for step in range(STEPS):
        live.append(training.executor.run_step(*training.microbatches(step)).peak_live)
        found.append(gradients(training.module))
        assert training.executor.idle
        gc.collect()
        tensors.append(
            sum(issubclass(type(item), Tensor) for item in gc.get_objects()) - len(found) * len(found[0])
        )
    torch.save({"gradients": found, "live": live, "tensors": tensors}, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
