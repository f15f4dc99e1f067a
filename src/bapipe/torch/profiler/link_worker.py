"""One rank of `bapipe profile --links`, as torchrun starts it: times point-to-point and all-reduce."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.io.files import dump_json, write_text
from bapipe.torch import slices
from bapipe.torch.health.parent_death import end_with_parent
from bapipe.torch.profiler.link_record import LinkMeasurement, LinkSample
from bapipe.torch.profiler.statistics import summarise

__all__ = ["main"]

_SIZES = (8, 2**12, 2**16, 2**20, 2**22, 2**24, 2**26)
"""bytes of a message"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Where:
    """This rank, and how it measures."""

    rank: int
    device: torch.device
    staged: bool
    """carried by the CPU's memory"""
    seconds: float
    """to spend on one thing"""


class _Carrier:
    """Tensors of one rank: in the CPU's memory, in the GPU's, or in the GPU's and carried by the CPU's."""

    def __init__(self, nbytes: int, device: torch.device, *, staged: bool) -> None:
        self.own = torch.ones(max(1, nbytes // 4), device=device)
        self.wire = torch.ones_like(self.own, device="cpu").pin_memory() if staged else self.own

    def load(self) -> None:
        """What is to be sent, to where it is sent from."""
        if self.wire is not self.own:
            self.wire.copy_(self.own)

    def send(self, peer: int, tag: int) -> dist.Work | None:
        self.load()
        return dist.isend(self.wire, peer, tag=tag)

    def receive(self, peer: int, tag: int) -> dist.Work | None:
        return dist.irecv(self.wire, peer, tag=tag)

    def arrived(self) -> None:
        if self.wire is not self.own:
            self.own.copy_(self.wire)
        if self.own.device.type == "cuda":
            torch.cuda.synchronize(self.own.device)


def _wait(work: dist.Work | None) -> None:
    assert work is not None
    work.wait()


def _repeat(action: Callable[[], None], decider: int, rank: int, seconds: float) -> list[float]:
    """Sample until `decider` has spent `seconds`; all ranks do as many."""
    for _ in range(2):
        action()
    samples: list[float] = []
    begun = time.perf_counter()
    go = torch.ones(1, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    while True:
        dist.barrier()
        start = time.perf_counter()
        action()
        samples.append(time.perf_counter() - start)
        if rank == decider:
            go[0] = float((time.perf_counter() - begun < seconds and len(samples) < 200) or len(samples) < 5)
        dist.broadcast(go, decider)
        if not go.item():
            return samples


def _one_way(first: int, second: int, nbytes: int, here: _Where) -> LinkSample:
    """There and back, halved: one direction at a time."""
    carrier = _Carrier(nbytes, here.device, staged=here.staged) if here.rank in (first, second) else None

    def ping_pong() -> None:
        if carrier is None:
            return
        if here.rank == first:
            _wait(carrier.send(second, 1))
            _wait(carrier.receive(second, 2))
            carrier.arrived()
        else:
            _wait(carrier.receive(first, 1))
            carrier.arrived()
            _wait(carrier.send(first, 2))

    samples = [value / 2 for value in _repeat(ping_pong, first, here.rank, here.seconds)]
    return LinkSample(first=first, second=second, nbytes=nbytes, both=False, seconds=summarise(samples))


def _both_ways(first: int, second: int, nbytes: int, here: _Where) -> LinkSample:
    """Both directions at once."""
    member = here.rank in (first, second)
    out = _Carrier(nbytes, here.device, staged=here.staged) if member else None
    back = _Carrier(nbytes, here.device, staged=here.staged) if member else None

    def exchange() -> None:
        if out is None or back is None:
            return
        peer = second if here.rank == first else first
        sending, receiving = (1, 2) if here.rank == first else (2, 1)
        out.load()
        # As one batch: NCCL runs what two ranks say to each other in order, and each would wait for the other.
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, out.wire, peer, tag=sending),
                dist.P2POp(dist.irecv, back.wire, peer, tag=receiving),
            ]
        )
        for work in works:
            _wait(work)
        back.arrived()

    samples = _repeat(exchange, first, here.rank, here.seconds)
    return LinkSample(first=first, second=second, nbytes=nbytes, both=True, seconds=summarise(samples))


def _all_reduce(nbytes: int, here: _Where) -> LinkSample:
    carrier = _Carrier(nbytes, here.device, staged=here.staged)

    def reduce() -> None:
        carrier.load()
        dist.all_reduce(carrier.wire)
        carrier.arrived()
        carrier.own.fill_(1.0)

    samples = _repeat(reduce, 0, here.rank, here.seconds)
    last = dist.get_world_size() - 1
    return LinkSample(first=0, second=last, nbytes=nbytes, both=True, seconds=summarise(samples))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure every pair of neighbours and the all-reduce; rank 0 writes the file."""
    parser = argparse.ArgumentParser(prog="bapipe.torch.profiler.link_worker")
    parser.add_argument("out", type=Path)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--largest", type=int, default=_SIZES[-1])
    parser.add_argument("--seconds", type=float, default=0.4, help="on one thing")
    options = parser.parse_args(argv)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if options.device == "cuda":
        cut = slices.status(0)
        if cut is not None and rank < len(cut):
            os.environ.update(slices.slice_environment(cut, rank))  # before CUDA starts in this process
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        options.backend,
        timeout=datetime.timedelta(seconds=120),
        device_id=device if options.backend == "nccl" else None,
    )
    dist.barrier()  # all ranks know each other before two of them speak
    staged = options.device == "cuda" and options.backend == "gloo"
    here = _Where(rank=rank, device=device, staged=staged, seconds=options.seconds)
    sizes = [size for size in _SIZES if size <= options.largest]
    pairs = [(index, index + 1) for index in range(world - 1)]
    samples: list[LinkSample] = []
    for first, second in pairs:
        for size in sizes:
            samples.append(_one_way(first, second, size, here))
            samples.append(_both_ways(first, second, size, here))
    reduces = [_all_reduce(size, here) for size in sizes]
    samples = _from_first(samples)
    if rank == 0:
        found = LinkMeasurement(
            ranks=world,
            backend=options.backend,
            device=options.device,
            pairs=tuple(samples),
            all_reduce=tuple(reduces),
        )
        write_text(options.out, dump_json(found))
    dist.destroy_process_group()


def _from_first(samples: list[LinkSample]) -> list[LinkSample]:
    """Each pair's times as its first member saw them, on every rank."""
    gathered: list[Tensor] = []
    for sample in samples:
        summary = sample.seconds
        values = torch.tensor(
            [summary.median, summary.low, summary.high, float(summary.count)], dtype=torch.float64
        )
        if dist.get_backend() == "nccl":
            values = values.cuda()
        dist.broadcast(values, sample.first)
        gathered.append(values.cpu())
    return [sample.with_values(values.tolist()) for sample, values in zip(samples, gathered, strict=True)]


if __name__ == "__main__":
    end_with_parent()
    main()
    sys.stdout.flush()
