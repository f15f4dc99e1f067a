"""One rank of the soak: trains, saves and evaluates, and samples what its process holds. `soak.py` starts it.

It goes on from the last checkpoint of its folder, and ends, saved, when its time is over. What it did is
FOLDER/part-<first step>-<rank>.json.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from faulty_model import build, loss, make_batch

from bapipe.records.plan import read_plan
from bapipe.torch import Checkpoints, Pipeline
from bapipe.torch.comm.rank_agreement import max_over_ranks
from bapipe.torch.runtime.process_group import join
from bapipe.torch.runtime.rank_slice import take_slice

RATE = 0.05


def held(device: torch.device) -> dict[str, int]:
    """What this process holds now."""
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (resident,) = (line.split()[1] for line in status if line.startswith("VmRSS:"))
    found = {
        "resident": 1024 * int(resident),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python_threads": threading.active_count(),
    }
    if device.type == "cuda":
        found["allocated"] = torch.cuda.memory_allocated(device)
        found["reserved"] = torch.cuda.memory_reserved(device)
    return found


def alone(steps: int, global_batch: int, microbatches: int, device: torch.device) -> list[float]:
    """Losses of the same training in one process: micro-batches one after the other, by plain torch."""
    torch.manual_seed(0)
    module = build()[0].to(device)
    optimizer = torch.optim.Adam(module.parameters(), lr=RATE)
    losses = []
    for step in range(steps):
        data, target = (value.to(device) for value in make_batch(step + 1, global_batch))
        parts = zip(data.chunk(microbatches), target.chunk(microbatches), strict=True)
        total = 0.0
        for inputs, classes in parts:
            found = loss(module(inputs), classes) / microbatches
            found.backward()  # type: ignore[no-untyped-call]
            total += float(found.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def train(settings: dict[str, Any], folder: Path) -> None:
    plan = read_plan(folder / "plan.json")
    device = settings["device"]
    take_slice(plan, int(os.environ["RANK"]), device)
    join(plan, 60.0)
    torch.set_num_threads(1)
    steps, every, evaluations, samples = (settings[name] for name in ("steps", "every", "evaluations", "samples"))
    with Pipeline(
        build, plan, loss, seed=0, device=device if device == "cpu" else None, transport=settings["transport"],
        timeout=120.0,
    ) as pipe:  # fmt: skip
        optimizer = torch.optim.Adam(pipe.parameters(), lr=RATE)
        checkpoints = Checkpoints(pipe, folder / "saved", optimizer=optimizer, keep=2, asynchronous=True)
        loaded = checkpoints.load()
        first = 0 if loaded is None else loaded.step
        losses, rows, evaluated, begun = [], [], 0, time.monotonic()
        for step in range(first, steps):
            batch = make_batch(step + 1, plan.global_batch)
            losses.append(pipe.step(*batch))
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % every == 0:
                checkpoints.save()
            if (step + 1) % evaluations == 0:
                pipe.evaluate(*batch)
                evaluated += 1
            if (step + 1) % samples == 0:
                rows.append({"step": step + 1, **held(pipe.device)})
                # All ranks end after the same step, whichever clock says so.
                if max_over_ranks(time.monotonic() - begun) > settings["seconds"] and step + 1 < steps:
                    checkpoints.save()
                    break
        checkpoints.close()
        seconds = time.monotonic() - begun
        rank, used = pipe.rank, pipe.device
    done = first + len(losses)
    found: dict[str, Any] = {
        "rank": rank, "first": first, "losses": losses, "samples": rows, "evaluations": evaluated,
        "seconds": seconds,
    }  # fmt: skip
    if rank == 0 and done == steps:
        found["alone"] = alone(steps, plan.global_batch, plan.microbatches, used)
    (folder / f"part-{first:08d}-{rank}.json").write_text(json.dumps(found), encoding="ascii")
    dist.destroy_process_group()


if __name__ == "__main__":
    train(json.loads(sys.argv[1]), Path(sys.argv[2]))
