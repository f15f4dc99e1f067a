"""A user's own training loop for tests: `own_loop.py PLAN FOLDER [--steps N] [--timeout S] [--slow RANK]`.

Each rank leaves its process number in FOLDER, and after its second step a file that says so. The slow rank then
does something long that has nothing to do with the pipeline.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from bapipe.records.plan import read_plan
from bapipe.torch import Pipeline
from bapipe.torch.inputs.build_model import build_model
from bapipe.torch.inputs.training_data import batches_for


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--slow", type=int, default=-1)
    parser.add_argument("--samples", type=int, help="of a global batch, where it is not the planned one")
    parser.add_argument("--own-group", action="store_true", help="make the process group here")
    parser.add_argument("--environment", action="store_true", help="leave the node's name, too")
    parser.add_argument("--leave-open", action="store_true", help="end without close; note if a group is left")
    options = parser.parse_args()
    logging.basicConfig(format="bapipe: %(message)s")
    torch.set_num_threads(1)
    if options.own_group:
        dist.init_process_group("gloo")
    if options.leave_open:
        note = options.folder / f"group-{os.environ['RANK']}"
        atexit.register(lambda: note.write_text(str(dist.is_initialized()), encoding="ascii"))
    plan = read_plan(options.plan)
    built = build_model(plan.model, folders=[Path.cwd()])
    pipe = Pipeline(
        lambda: (built.module, built.args, built.kwargs), plan, built.loss, seed=None, timeout=options.timeout
    )
    (options.folder / f"pid-{pipe.rank}").write_text(str(os.getpid()), encoding="ascii")
    if options.environment:
        (options.folder / f"node-{pipe.rank}").write_text(os.environ["BAPIPE_NODE"], encoding="ascii")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.001)
    batches = batches_for(built, "synthetic", global_batch=options.samples or plan.global_batch, seed=0)
    for step in range(options.steps):
        pipe.step(*batches(step))
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            (options.folder / f"stepped-{pipe.rank}").touch()
            if pipe.rank == options.slow:
                time.sleep(600)
    if options.leave_open:
        return
    pipe.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
