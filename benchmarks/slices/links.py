"""How fast the links between the ranks are; what a cluster file would say."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bapipe.torch.comm import P2PChannel, TensorShape, make_transport
from bapipe.torch.runtime.gradient_sync import BUCKET_BYTES

__all__ = ["measure_links"]

SIZE = 128 * 2**20
"""bytes of the messages that links are measured with: so many that latency, which varies, does not matter"""
_BUCKETS = 24
"""of gradients that are summed at once, 630 MB: as many as models have that data parallelism is slow for"""
_SUMS = 5
"""rounds of them, at most"""
_REHEARSED_SIZE, _REHEARSED_BUCKETS, _REHEARSED_WIDTH = 2**20, 2, 8
"""the same on a CPU, whose times mean nothing, and how much narrower what is trained beside them is"""


def measure_links(device: torch.device, *, rounds: int) -> dict[str, float]:
    """Messages between all neighbours at once, both ways, as in a pipeline; the latency of one; and the all-reduce
    of some buckets of gradients, all under way at once, as after a backward.

    The all-reduce is measured alone (`all_reduce`) and on ranks that train something else meanwhile
    (`all_reduce_loaded`), as data parallelism has it beside its backward.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    rehearsed = device.type == "cpu"
    size, count = (_REHEARSED_SIZE, _REHEARSED_BUCKETS) if rehearsed else (SIZE, _BUCKETS)
    message = (TensorShape(shape=(size // 4,), dtype=torch.float32),)
    neighbours = [ends for low in range(world - 1) for ends in ((low, low, low + 1), (low, low + 1, low))]
    channels = {_channel(*ends): message for ends in neighbours}
    transport = make_transport("auto", device=device, channels=channels, timeout=60.0)
    big = _exchanged(transport, device, size, max(2, rounds // 8))
    small = _exchanged(transport, device, 1024, 2 * rounds)
    alone = _returned(transport, device, 2 * rounds)
    transport.close()
    dist.barrier()
    buckets = [torch.zeros(BUCKET_BYTES // 4, device=device) for _ in range(count)]
    moved = 2 * (world - 1) / world * sum(bucket.nbytes for bucket in buckets)
    sums = min(rounds, _SUMS)
    idle = _reduced(buckets, sums)
    with _training(device):
        busy = _reduced(buckets, sums)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return {
        "latency": alone,
        "bandwidth": size / max(big - small, 1e-6),
        "all_reduce": moved / idle if rank == 0 else 0.0,
        "all_reduce_loaded": moved / busy if rank == 0 else 0.0,
    }


def _reduced(buckets: Sequence[Tensor], rounds: int) -> float:
    """Seconds until all are summed; every rank does as many rounds."""
    number = torch.tensor(float(rounds))
    dist.broadcast(number, 0)
    device = buckets[0].device
    times = []
    for _ in range(1 + int(number)):  # the first one connects
        dist.barrier()
        start = time.perf_counter()
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            assert work is not None
            work.wait()
        _synchronize_stream(device)  # not the device: what is trained goes on
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


@contextlib.contextmanager
def _training(device: torch.device) -> Iterator[None]:
    """Train a recurrent and a convolutional layer by turns, on a thread and a stream of their own."""
    ended = threading.Event()
    less = _REHEARSED_WIDTH if device.type == "cpu" else 1
    features, channels, side = 1024 // less, 64 // less, 112 // less
    layers = [
        (nn.LSTM(features, features).to(device), torch.zeros(50, 64, features, device=device)),
        (
            nn.Conv2d(channels, channels, 3, padding=1).to(device),
            torch.zeros(16, channels, side, side, device=device),
        ),
    ]

    def train() -> None:
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        done = torch.cuda.Event(blocking=True) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            while not ended.is_set():
                for layer, value in layers:
                    made = layer(value)
                    (made[0] if isinstance(made, tuple) else made).sum().backward()
                if done is not None:  # or it would issue more and more
                    done.record(stream)
                    done.synchronize()

    thread = threading.Thread(target=train, name="training", daemon=True)
    _synchronize(device)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _synchronize_stream(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()


def _exchanged(transport: Any, device: torch.device, size: int, rounds: int) -> float:
    """Seconds of one message from rank to rank, with all ranks sending to both neighbours."""
    rank, world = dist.get_rank(), dist.get_world_size()
    message = (TensorShape(shape=(size // 4,), dtype=torch.float32),)
    value = torch.zeros(size // 4, device=device)
    peers = [peer for peer in (rank - 1, rank + 1) if 0 <= peer < world]

    def exchange() -> None:  # a rank cannot be a round ahead of its neighbours
        waits = []
        for peer in peers:
            low = min(rank, peer)
            waits.append(transport.receive(_channel(low, peer, rank), message))
            waits.append(transport.send(_channel(low, rank, peer), [value]))
        for wait in waits:
            wait()
        _synchronize(device)

    return _per_round(exchange, rounds)


def _returned(transport: Any, device: torch.device, rounds: int) -> float:
    """Seconds of one small message: half of what it takes there and back, between pairs of neighbours."""
    rank, world = dist.get_rank(), dist.get_world_size()
    message = (TensorShape(shape=(256,), dtype=torch.float32),)
    value = torch.zeros(256, device=device)
    peer, low = rank ^ 1, rank - rank % 2

    def there_and_back() -> None:
        if peer >= world:
            return
        arrives = transport.receive(_channel(low, peer, rank), message)
        if rank != low:
            arrives()
        delivered = transport.send(_channel(low, rank, peer), [value])
        if rank == low:
            arrives()
        _synchronize(device)
        delivered()

    return _per_round(there_and_back, rounds) / 2


def _per_round(action: Callable[[], None], rounds: int) -> float:
    """Seconds of one of so many, of the rank that takes longest; of three tries the better of the last two."""
    times = []
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(rounds):
            action()
        times.append((time.perf_counter() - start) / rounds)
    slowest = torch.tensor(times[1:], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.min())


def _channel(boundary: int, source: int, target: int) -> P2PChannel:
    return P2PChannel(boundary=boundary, onward=source < target, from_rank=source, to_rank=target)
