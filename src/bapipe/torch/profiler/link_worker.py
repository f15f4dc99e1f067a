"""One rank of `bapipe profile --links`: times messages and sums as a run exchanges them."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.errors import BaPipeError
from bapipe.hardware.transport_names import TRANSPORTS
from bapipe.io.files import dump_json, write_text
from bapipe.io.run_folder import found_folder
from bapipe.torch import slices
from bapipe.torch.comm import Message, P2PChannel, TensorShape, Transport
from bapipe.torch.comm.choose_transport import connect
from bapipe.torch.comm.collectives import BUCKET_BYTES, all_gather, reduce_scatter
from bapipe.torch.comm.gloo_groups import meet
from bapipe.torch.device.take_device import take_device
from bapipe.torch.health.parent_death import end_with_parent
from bapipe.torch.profiler.link_record import LinkMeasurement, LinkSample
from bapipe.torch.profiler.statistics import summarise

__all__ = ["main"]

_ELEMENT = torch.float32.itemsize
_SIZES = (8, 2**12, 2**16, 2**20, 2**22, 2**24, 2**26)
"""bytes of a message"""
_PATIENCE = datetime.timedelta(seconds=120)
_MOST = 200
"""samples of one thing"""
_QUEUED = 4
"""buckets that are summed at once"""
_PIECES = 8
"""weights or gradients in a buffer"""
_PRODUCTS = 20
"""of matrices, by which the time of one is known"""
_SIDE = {"cpu": 256, "cuda": 2048}
"""of the matrices that are multiplied beside a transfer"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Here:
    """This rank, and how it measures."""

    rank: int
    device: torch.device
    transport: Transport
    seconds: float
    """to spend on one thing"""

    def value(self, nbytes: int) -> Tensor:
        return torch.ones(nbytes, dtype=torch.uint8, device=self.device)

    def settle(self) -> None:
        """Wait for this thread's stream."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def _message(nbytes: int) -> Message:
    return (TensorShape(shape=(nbytes,), dtype=torch.uint8),)


def _channels(world: int, largest: int) -> dict[P2PChannel, Message]:
    """Between neighbours, there and back, with the largest message."""
    found = {}
    for rank in range(world - 1):
        onward = P2PChannel(boundary=rank, onward=True, from_rank=rank, to_rank=rank + 1)
        found[onward] = found[onward.reverse] = _message(largest)
    return found


def _repeat(action: Callable[[], None], here: _Here) -> list[float]:
    """Sample until rank 0 has spent its time; all ranks take as many."""
    for _ in range(2):
        action()
    samples: list[float] = []
    begun = time.perf_counter()
    go = torch.ones(1)
    while True:
        dist.barrier()
        start = time.perf_counter()
        action()
        samples.append(time.perf_counter() - start)
        if here.rank == 0:
            spent = time.perf_counter() - begun
            go[0] = float((spent < here.seconds and len(samples) < _MOST) or len(samples) < 5)
        dist.broadcast(go, 0)
        if not go.item():
            return samples


def _there_and_back(channel: P2PChannel, here: _Here, *, there: int, back: int) -> Callable[[], None]:
    """A message over the channel, and when it is there another one back."""
    value = here.value(there if here.rank == channel.from_rank else back)

    def exchange() -> None:
        if here.rank == channel.from_rank:
            answer = here.transport.receive(channel.reverse, _message(back))
            delivered = here.transport.send(channel, [value])
            answer()
            here.settle()
            delivered()
        elif here.rank == channel.to_rank:
            here.transport.receive(channel, _message(there))()
            here.settle()
            here.transport.send(channel.reverse, [value])()

    return exchange


def _one_way(channel: P2PChannel, nbytes: int, here: _Here) -> LinkSample:
    """From one rank to the other, as the sender sees it: an answer of a few bytes is taken off by its half."""
    least = min(nbytes, _SIZES[0])
    bare = _repeat(_there_and_back(channel, here, there=least, back=least), here)
    taken = _repeat(_there_and_back(channel, here, there=nbytes, back=least), here)
    answer = sorted(bare)[len(bare) // 2] / 2
    return _sample(channel, nbytes, [max(value - answer, value / 2) for value in taken], both=False)


def _sample(
    channel: P2PChannel, nbytes: int, samples: Sequence[float], *, both: bool, busy: bool = False, pairs: int = 1
) -> LinkSample:
    return LinkSample(
        first=channel.from_rank,
        second=channel.to_rank,
        nbytes=nbytes,
        both=both,
        busy=busy,
        pairs=pairs,
        seconds=summarise(list(samples)),
    )


def _both_ways(channels: Sequence[P2PChannel], nbytes: int, here: _Here, *, busy: bool) -> LinkSample:
    """Both directions of one pair at once, or of several pairs."""
    own = [item for item in channels if here.rank in (item.from_rank, item.to_rank)]
    sent = {item: here.value(nbytes) for item in own}

    def exchange() -> None:
        waits: list[Callable[[], object]] = []
        for onward in own:
            out = onward if here.rank == onward.from_rank else onward.reverse
            waits.append(here.transport.receive(out.reverse, _message(nbytes)))
            waits.append(here.transport.send(out, [sent[onward]]))
        for wait in waits:
            wait()
        here.settle()

    with _working(here) if busy else contextlib.nullcontext():
        samples = _repeat(exchange, here)
    return _sample(channels[0], nbytes, samples, both=True, busy=busy, pairs=len(channels))


@contextlib.contextmanager
def _working(here: _Here) -> Iterator[None]:
    """Matrices are multiplied meanwhile, on a stream and in a thread of their own."""
    left, right = (torch.randn(_SIDE[here.device.type], _SIDE[here.device.type], device=here.device) for _ in "ab")
    stop = threading.Event()

    def work() -> None:
        if here.device.type == "cpu":
            while not stop.is_set():
                torch.mm(left, right)
            return
        stream = torch.cuda.Stream(here.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.default_stream(here.device))
        with torch.cuda.stream(stream):
            while not stop.is_set():
                for _ in range(4):
                    torch.mm(left, right)
                stream.synchronize()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Collectives:
    """Collectives over the first `size` ranks."""

    group: dist.ProcessGroup
    size: int
    here: _Here

    def all_reduce(self, nbytes: int, *, busy: bool) -> LinkSample:
        """One sum at a time."""
        value = self._value(nbytes)

        def reduce() -> None:
            dist.all_reduce(value, group=self.group)
            self.here.settle()
            value.fill_(1.0)

        with _working(self.here) if busy else contextlib.nullcontext():
            return self._timed(reduce, nbytes, busy=busy)

    def buckets(self, nbytes: int) -> LinkSample:
        """Several sums of so many bytes, all under way at once, as a step has them: of gradients that are copied
        into a buffer for it."""
        values = self._gradients(nbytes)

        def reduce() -> None:
            for work in self._begin(values):
                work.wait()
            self.here.settle()

        return self._timed(reduce, _QUEUED * nbytes)

    def gather(self, nbytes: int) -> LinkSample:
        """As FSDP2 gathers weights: into a buffer, and out of it."""
        own = self._value(-(-nbytes // self.size))

        def gather() -> None:
            buffer = own.new_empty(self.size * own.numel())
            all_gather(buffer, own.clone(), group=self.group)
            torch.cat(buffer.tensor_split(_PIECES))
            self.here.settle()

        return self._timed(gather, nbytes)

    def scatter(self, nbytes: int) -> LinkSample:
        """As gradients are summed and scattered: copied into a buffer for it."""
        each = -(-nbytes // (_ELEMENT * self.size))  # every rank is left with as many
        pieces = self._value(_ELEMENT * self.size * each).tensor_split(_PIECES)

        def scatter() -> None:
            whole = torch.cat(pieces)
            reduce_scatter(whole.new_empty(whole.numel() // self.size), whole, group=self.group)
            self.here.settle()

        return self._timed(scatter, nbytes)

    def unit(self, nbytes: int) -> tuple[LinkSample, LinkSample]:
        """A gather and a scatter of a unit by FSDP2, with its own work; of all ranks."""
        from bapipe.torch.profiler.sharded_units import unit_seconds  # FSDP2 takes a second to import

        gathers, scatters = unit_seconds(nbytes, self.group, lambda step: _repeat(step, self.here))
        return self._sample(gathers, nbytes), self._sample(scatters, nbytes)

    def overlap(self, nbytes: int) -> float:
        """The share of its time that a sum takes nothing from as long a compute beside it."""
        values = self._gradients(nbytes)
        side = _SIDE[self.here.device.type]
        left, right = (torch.randn(side, side, device=self.here.device) for _ in "ab")

        def both(works: int, products: int) -> float:
            def run() -> None:
                under_way = self._begin(values[:works])
                for _ in range(products):
                    torch.mm(left, right)
                for work in under_way:
                    work.wait()
                self.here.settle()

            return self._timed(run, nbytes).seconds.median

        sums, few = both(_QUEUED, 0), both(0, _PRODUCTS)
        products = max(1, round(_PRODUCTS * sums / max(few, 1e-9)))
        alone, together = both(0, products), both(_QUEUED, products)
        return min(1.0, max(0.0, (alone + sums - together) / min(alone, sums)))

    def _gradients(self, nbytes: int) -> list[tuple[Tensor, ...]]:
        """Of several buckets."""
        return [self._value(nbytes).tensor_split(_PIECES) for _ in range(_QUEUED)]

    def _begin(self, buckets: Sequence[tuple[Tensor, ...]]) -> list[dist.Work]:
        works = [dist.all_reduce(torch.cat(own), group=self.group, async_op=True) for own in buckets]
        return [work for work in works if work is not None]

    def _value(self, nbytes: int) -> Tensor:
        """Zeros, which stay what they are however often they are summed."""
        return torch.zeros(max(1, nbytes // _ELEMENT), device=self.here.device)

    def _timed(self, action: Callable[[], None], nbytes: int, *, busy: bool = False) -> LinkSample:
        """Ranks that take no part wait for the others."""
        return self._sample(
            _repeat(action if self.here.rank < self.size else _nothing, self.here), nbytes, busy=busy
        )

    def _sample(self, samples: Sequence[float], nbytes: int, *, busy: bool = False) -> LinkSample:
        return LinkSample(
            first=0, second=self.size - 1, nbytes=nbytes, both=True, busy=busy, seconds=summarise(list(samples))
        )


def _nothing() -> None:
    """What a rank does that takes no part."""


def _group_sizes(world: int) -> list[int]:
    """2, 4, 8 … and all."""
    sizes = [2**power for power in range(1, world.bit_length()) if 2**power < world]
    return [*sizes, world]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure neighbours, all pairs of neighbours at once, and sums; rank 0 writes the file."""
    parser = argparse.ArgumentParser(prog="bapipe.torch.profiler.link_worker")
    parser.add_argument("out", type=Path)
    parser.add_argument("--transport", choices=TRANSPORTS, default="auto")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--largest", type=int, default=_SIZES[-1])
    parser.add_argument("--seconds", type=float, default=0.2, help="on one thing")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    device = _device(options.device)
    folder = found_folder()
    if folder is None:
        raise BaPipeError("links are measured by the ranks that bapipe profile --links starts; use that")
    meet(folder, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), _PATIENCE)
    world = dist.get_world_size()
    sizes = [size for size in _SIZES if size <= options.largest]
    try:
        connection = connect(
            options.transport,
            device=device,
            channels=_channels(world, sizes[-1]),
            timeout=_PATIENCE.total_seconds(),
        )
    except BaPipeError as error:
        if dist.get_rank() == 0:
            print(f"BaPipeError: {error}", file=sys.stderr)
        return 2
    here = _Here(rank=dist.get_rank(), device=device, transport=connection.transport, seconds=options.seconds)
    large = sizes[-3::2]
    onward = [channel for channel in _channels(world, sizes[-1]) if channel.onward]
    samples: list[LinkSample] = []
    for channel in onward:
        for size in sizes:
            samples += [_one_way(channel, size, here), _one_way(channel.reverse, size, here)]
            samples.append(_both_ways([channel], size, here, busy=False))
        samples += [_both_ways([channel], size, here, busy=True) for size in large]
    together = [_both_ways(onward, size, here, busy=busy) for size in large for busy in (False, True)]
    bucket = min(BUCKET_BYTES, sizes[-1])
    reduces, buckets, gathers, scatters = [], [], [], []
    fetches: list[LinkSample] = []
    spreads: list[LinkSample] = []
    overlap = None
    for size in _group_sizes(world):
        group = connection.sum_group(range(size), device, _PATIENCE)
        own = _Collectives(group=group, size=size, here=here)
        reduces += [own.all_reduce(nbytes, busy=False) for nbytes in sizes]
        reduces += [own.all_reduce(nbytes, busy=True) for nbytes in large]
        buckets.append(own.buckets(bucket))
        units = sizes if device.type == "cuda" else [nbytes for nbytes in sizes if nbytes <= bucket]
        gathers += [own.gather(nbytes) for nbytes in units]
        scatters += [own.scatter(nbytes) for nbytes in units]
        if device.type == "cpu" and size == world:
            for nbytes in units[1::2]:
                fetch, spread = own.unit(nbytes)
                fetches.append(fetch)
                spreads.append(spread)
        overlap = own.overlap(bucket)
    samples = _from_first(samples)
    if here.rank == 0:
        found = LinkMeasurement(
            ranks=world,
            backend=connection.transport.name,
            sums=connection.sums,
            reason=connection.reason,
            device=options.device,
            pairs=tuple(samples),
            together=tuple(together),
            all_reduce=tuple(reduces),
            buckets=tuple(buckets),
            gather=tuple(gathers),
            scatter=tuple(scatters),
            unit_gather=tuple(fetches),
            unit_scatter=tuple(spreads),
            overlap=overlap,
        )
        write_text(options.out, dump_json(found))
    dist.barrier()
    connection.transport.close()
    dist.destroy_process_group()
    return 0


def _device(kind: str) -> torch.device:
    """This rank's: on a GPU that is cut, its slice."""
    if kind == "cpu":
        return torch.device("cpu")
    rank = int(os.environ["RANK"])
    cut = slices.status(0)
    if cut is not None and rank < len(cut):
        os.environ.update(slices.slice_environment(cut, rank))  # before CUDA starts in this process
    device = torch.device("cuda", rank % torch.cuda.device_count())
    take_device(device)
    return device


def _from_first(samples: list[LinkSample]) -> list[LinkSample]:
    """Each pair's times as its first member saw them, on every rank."""
    gathered: list[Tensor] = []
    for sample in samples:
        summary = sample.seconds
        values = torch.tensor(
            [summary.median, summary.low, summary.high, float(summary.count)], dtype=torch.float64
        )
        dist.broadcast(values, sample.first)
        gathered.append(values)
    return [sample.with_values(values.tolist()) for sample, values in zip(samples, gathered, strict=True)]


if __name__ == "__main__":
    end_with_parent()
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # NCCL and its threads take their time to end
