"""One rank of the benchmark: worker.py JOB RANK. Times links, then systems in turn, and writes what it saw.

All ranks are processes of one machine, so their `time.perf_counter()` is one clock.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from stages import Case, make_stage, sleep_until
from systems import Step, step_of
from torch import Tensor, nn

_LEAD = 0.02
"""seconds from rank 0's word to the common start, enough for it to reach all"""
_WARM = 5
"""messages before a link is timed, while TCP learns how fast it is"""


def main(job_path: Path, rank: int) -> None:
    job = json.loads(job_path.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job['store']}",
        rank=rank,
        world_size=job["world"],
        timeout=datetime.timedelta(seconds=120),
    )
    links = [_link(size, job["link_repeats"], rank) for size in job["link_bytes"]]
    runs = _run(job, rank)
    job_path.with_name(f"{job_path.stem}-{rank}.json").write_text(
        json.dumps({"links": links, **runs}), encoding="utf-8"
    )
    dist.barrier()
    dist.destroy_process_group()


def _link(nbytes: int, repeats: int, rank: int) -> list[float] | None:
    """Seconds one way, to the next rank, of a message whose receiver waits: there and back, halved."""
    found = None
    out, back = torch.ones(nbytes // 4), torch.empty(nbytes // 4)
    for first in range(dist.get_world_size() - 1):
        dist.barrier()
        if rank == first:
            found = [_there_and_back(out, back, rank + 1) / 2 for _ in range(_WARM + repeats)][_WARM:]
        elif rank == first + 1:
            coming = _work(dist.irecv(back, first, tag=1))
            for number in range(_WARM + repeats):
                coming.wait()
                if number + 1 < _WARM + repeats:
                    coming = _work(dist.irecv(back, first, tag=1))
                _work(dist.isend(out, first, tag=2)).wait()
    return found


def _there_and_back(out: Tensor, back: Tensor, peer: int) -> float:
    coming = _work(dist.irecv(back, peer, tag=2))
    begin = time.perf_counter()
    sent = _work(dist.isend(out, peer, tag=1))
    coming.wait()
    seconds = time.perf_counter() - begin
    sent.wait()
    return seconds


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None
    return work


def _run(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Every system on every case, one after the other, and again."""
    prepared: list[tuple[str, nn.Module, Step]] = []
    for name, fields in job["cases"].items():
        case = Case(**fields)
        for system in job["systems"][name]:
            module = make_stage(case, rank)
            step = step_of(system, case, module, rank=rank, world=job["world"])
            prepared.append((f"{name}/{system}", module, step))
    gradients = {}
    for _ in range(job["warmup"]):
        for name, module, step in prepared:
            _timed(step, rank)
            gradients[name] = _gradient(module)
    samples: dict[str, list[Sequence[float]]] = {name: [] for name, _, _ in prepared}
    for _ in range(job["repeats"]):
        for name, module, step in prepared:
            samples[name].append(_timed(step, rank))
            module.zero_grad()
    return {"samples": samples, "gradients": gradients}


def _timed(step: Step, rank: int) -> tuple[float, float, float, float, float]:
    """Common start, own end, and the CPU time of this thread, of its process and of the whole machine between."""
    moment = torch.tensor([time.perf_counter() + _LEAD if rank == 0 else 0.0], dtype=torch.float64)
    dist.broadcast(moment, 0)
    start = float(moment)
    sleep_until(start)
    machine, thread, process = _machine_seconds(), time.thread_time(), time.process_time()
    step()
    end = time.perf_counter()
    thread, process = time.thread_time() - thread, time.process_time() - process
    return start, end, thread, process, _machine_seconds() - machine


def _machine_seconds() -> float:
    """CPU time that all processes have had, and the host has taken, since the start; without interrupts."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    user, nice, system, stolen = (int(fields[index]) for index in (1, 2, 3, 8))
    return (user + nice + system + stolen) / os.sysconf("SC_CLK_TCK")


def _gradient(module: nn.Module) -> list[float]:
    gradients = [item.grad for item in module.parameters() if item.grad is not None]
    module.zero_grad()
    return [float(value) for gradient in gradients for value in gradient.flatten()]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
