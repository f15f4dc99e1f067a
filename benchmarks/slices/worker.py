"""One rank of all cases: asked through files, because a process is slow to start on a GPU."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deep_gnmt import build_deep_gnmt
from emulated import slow_down
from links import measure_links
from torch_schedules import train_torch

from bapipe.records.plan import read_plan
from bapipe.records.run_record import write_run
from bapipe.torch.capturing import capture
from bapipe.torch.comm.rank_agreement import gathered
from bapipe.torch.device.cuda_workspaces import release_workspaces
from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.launch.train import train
from bapipe.torch.launch.train_pipedream import train_pipedream
from bapipe.torch.runtime.plan_checks import check_plan
from bapipe.torch.stage.error_context import one_line


def main(folder: Path, device: torch.device, limit: int) -> None:
    slice_, count, parent = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.getppid()
    faulthandler.register(signal.SIGUSR1)
    if device.type == "cuda":
        torch.cuda.set_device(0)
    if limit:  # what tracing needs for itself is there before the memory is limited
        capture(*build_deep_gnmt(layers=4, hidden=8, vocabulary=8, sequence=2, with_loss=True), check=False)
    number = 0
    while True:
        path = folder / f"request-{number}.json"
        if not path.exists():
            if os.getppid() != parent:
                return  # nobody is left to ask
            time.sleep(0.02)
            continue
        request = json.loads(path.read_text(encoding="utf-8"))
        if request.get("stop"):
            return
        members = request.get("slices", list(range(count)))
        if slice_ not in members:
            number += 1
            continue
        rank, world = members.index(slice_), len(members)
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/store-{number}",
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=120),
            )
            with _limited(limit):
                answer = answered(request, device)
            dist.barrier()
        except BaseException as error:  # the process ends at once, so that the others are not waited for
            traceback.print_exc()
            sys.stderr.flush()
            _write(
                folder / f"failure-{number}-{rank}", {"at": time.time(), "rank": rank, "error": one_line(error)}
            )
            os._exit(1)
        if rank == 0:
            _write(folder / f"answer-{number}", answer)
        dist.destroy_process_group()
        number += 1


def _write(path: Path, value: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value), encoding="utf-8")
    part.rename(path.with_suffix(".json"))


@contextlib.contextmanager
def _limited(limit: int) -> Iterator[None]:
    """No more than so many bytes beyond what the process has now, if any. On a GPU MPS does that."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    if limit:
        gc.collect()
        with open("/proc/self/status", encoding="ascii") as lines:
            held = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
        resource.setrlimit(resource.RLIMIT_DATA, (held + limit, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_DATA, before)


def answered(request: dict[str, Any], device: torch.device) -> dict[str, Any]:
    if "links" in request:
        return measure_links(device, rounds=request["links"])
    gc.collect()
    if device.type == "cuda":
        release_workspaces()  # of what was asked before
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    plan = read_plan(request["plan"])
    if request.get("torch"):
        return train_torch(plan, request["torch"], steps=request["steps"], device=device)
    options = RunOptions(steps=request["steps"], transport=request.get("transport", "auto"), timeout=120.0)
    slow_down(request.get("emulate"))
    record = (train_pipedream if plan.schedule.name == "pipedream" else train)(check_plan(plan), options)
    if record is not None:
        write_run(record, request["run"])
    return {"reserved": reserved_by_ranks(device)}


def reserved_by_ranks(device: torch.device) -> list[list[int]]:
    """On rank 0, of each rank the most bytes that torch's allocator had of the GPU, and those left free; none on a
    CPU."""
    if device.type != "cuda":
        return []
    return gathered([torch.cuda.max_memory_reserved(device), torch.cuda.mem_get_info(device)[0]])


if __name__ == "__main__":
    main(Path(sys.argv[1]), torch.device(sys.argv[2]), int(sys.argv[3]))
