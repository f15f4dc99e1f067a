"""One rank of all cases: asked through files, because a process is slow to start on a GPU."""

from __future__ import annotations

import datetime
import faulthandler
import gc
import json
import os
import signal
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from emulated import slow_down

from bapipe.plan import read_plan
from bapipe.run_record import write_run
from bapipe.torch.pipedream_train import train_pipedream
from bapipe.torch.train import Settings, train
from bapipe.torch.transport import Wire, make_transport
from bapipe.torch.transport.wire import TensorShape

SIZE = 16 * 2**20
"""bytes of the messages that links are measured with"""


def main(folder: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    faulthandler.register(signal.SIGUSR1)
    torch.cuda.set_device(0)
    number = 0
    while True:
        path = folder / f"request-{number}.json"
        if not path.exists():
            time.sleep(0.02)
            continue
        request = json.loads(path.read_text(encoding="utf-8"))
        if request.get("stop"):
            return
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store-{number}",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=120),
        )
        try:
            answer = answered(request, rank, world)
        except Exception:
            traceback.print_exc()  # the process ends at once, so that the others are not waited for
            sys.stderr.flush()
            os._exit(1)
        if rank == 0:
            part = folder / f"answer-{number}.part"
            part.write_text(json.dumps(answer), encoding="utf-8")
            part.rename(folder / f"answer-{number}.json")
        dist.barrier()
        dist.destroy_process_group()
        number += 1


def answered(request: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    if "links" in request:
        return measure_links(rank, world)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    settings = Settings(steps=request["steps"], transport=request["transport"], timeout=120.0)
    slow_down(request.get("emulate"))
    plan = read_plan(request["plan"])
    record = (train_pipedream if plan.schedule.name == "pipedream" else train)(plan, settings)
    if record is not None:
        write_run(record, request["run"])
    return {"done": True}


def measure_links(rank: int, world: int) -> dict[str, float]:
    """All neighbours at once, both ways, as in a pipeline; and the all-reduce of a bucket of gradients."""
    device = torch.device("cuda", 0)
    transport = make_transport("auto", device=device, timeout=60.0)
    big = exchanged(transport, rank, world, SIZE, 30)
    small = exchanged(transport, rank, world, 1024, 60)
    transport.close()
    flat = torch.zeros(25 * 2**18, device=device)
    for _ in range(3):
        dist.all_reduce(flat)
    times = []
    for _ in range(15):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(flat)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    each = statistics.median(times)
    return {
        "latency": small,
        "bandwidth": SIZE / max(big - small, 1e-6),
        "all_reduce": 2 * (world - 1) / world * flat.nbytes / each,
    }


def exchanged(transport: Any, rank: int, world: int, size: int, rounds: int) -> float:
    """Seconds of one message from rank to rank, with all ranks sending to both neighbours."""
    message = (TensorShape(shape=(size // 4,), dtype=torch.float32),)
    value = torch.zeros(size // 4, device="cuda")
    peers = [peer for peer in (rank - 1, rank + 1) if 0 <= peer < world]
    times = []
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(rounds):  # a rank cannot be a round ahead of its neighbours
            waits = []
            for peer in peers:
                low = min(rank, peer)
                waits.append(transport.receive(_wire(low, peer, rank), message))
                waits.append(transport.send(_wire(low, rank, peer), [value]))
            for wait in waits:
                wait()
            torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / rounds)
    slowest = torch.tensor(times[1:], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.min())


def _wire(boundary: int, source: int, target: int) -> Wire:
    return Wire(boundary=boundary, onward=source < target, from_rank=source, to_rank=target)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
