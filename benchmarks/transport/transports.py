"""Latency and bandwidth of every transport between two ranks; README.md here says what is measured.

    PYTHONPATH=src python3 benchmarks/transport/transports.py --out DIR [--transports staged,ipc] [--slices] \
        [--largest 67108864] [--seconds 0.3]

Writes DIR/transports.json and DIR/transports.md. Needs torch and numpy only. "gloo" moves tensors in host memory,
the others CUDA tensors; with one GPU both ranks are on it, with --slices each on half of its multiprocessors (by
CUDA MPS).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bapipe.io.files import dump_json, write_text
from bapipe.torch import slices
from bapipe.torch.comm import Inbox, Outbox, P2PChannel, TensorShape, Transport, make_transport
from bapipe.torch.profiler.environment import environment_of
from bapipe.torch.profiler.statistics import SampleSummary, summarise
from bapipe.units import format_bandwidth, format_seconds

SIZES = tuple(2**power for power in range(10, 27, 2))
"""bytes of a message"""
THERE = P2PChannel(boundary=0, onward=True, from_rank=0, to_rank=1)
BACK = THERE.reverse
STREAM = (8, 32)
"""at least and at most so many messages follow each other in one sample of the bandwidth, of `STREAM_BYTES`"""
STREAM_BYTES = 2**28
TIMEOUT = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One transport and size of message."""

    transport: str
    nbytes: int
    latency: SampleSummary
    """there and back, halved: from a kernel's end to the moment the other rank's stream may use the message"""
    one_way: SampleSummary
    """per message, many of them one after another"""
    both_ways: SampleSummary
    """per message of each direction, both at once"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--transports", default="gloo,staged,ipc")
    made.add_argument("--slices", action="store_true", help="each rank on half of the GPU, by CUDA MPS")
    made.add_argument("--largest", type=int, default=SIZES[-1], help="bytes")
    made.add_argument("--seconds", type=float, default=0.3, help="on one number")
    made.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    made.add_argument("--rendezvous", help=argparse.SUPPRESS)
    return made


def main() -> None:
    options = parser().parse_args()
    if options.rank is not None:
        rank_main(options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    about: dict[str, Any] = {}
    with sliced(options.slices) as environments:
        for name in options.transports.split(","):
            found = measured(name, options, environments)
            rows += found["rows"]
            about[name] = found["environment"]
    write_text(options.out / "transports.json", dump_json({"environment": about, "rows": rows}))
    text = table(rows, about)
    write_text(options.out / "transports.md", text)
    print(text)


@contextlib.contextmanager
def sliced(wanted: bool) -> Iterator[list[dict[str, str]]]:
    """The environment of each rank."""
    if not wanted:
        yield [{}, {}]
        return
    cut = slices.start(slices.even_slices(2))
    try:
        yield [slices.slice_environment(cut, index) for index in range(2)]
    finally:
        slices.stop()


def measured(name: str, options: argparse.Namespace, environments: list[dict[str, str]]) -> dict[str, Any]:
    """What two processes find out about one transport."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--out", folder, "--transports", name]
        command += ["--largest", str(options.largest), "--seconds", str(options.seconds)]
        command += ["--rendezvous", f"file://{folder}/rendezvous"] + (["--slices"] if options.slices else [])
        ranks = [
            subprocess.Popen(
                [*command, "--rank", str(rank)],
                env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **environments[rank]},
            )
            for rank in range(2)
        ]
        try:
            codes = [rank.wait(timeout=600) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if codes != [0, 0]:
            raise SystemExit(f"{name}: the ranks ended with {codes}")
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
        return found


def rank_main(options: argparse.Namespace) -> None:
    """One of the two ranks; the first writes what both found."""
    torch.set_num_threads(1)
    name = options.transports
    device = torch.device("cpu")
    if name != "gloo":
        device = torch.device("cuda", options.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        "gloo",
        init_method=options.rendezvous,
        rank=options.rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=TIMEOUT),
    )
    largest = (TensorShape(shape=(options.largest,), dtype=torch.uint8),)
    transport = make_transport(name, device=device, channels={THERE: largest, BACK: largest}, timeout=TIMEOUT)
    rows = [
        row(transport, nbytes, options.rank, device, options.seconds)
        for nbytes in SIZES
        if nbytes <= options.largest
    ]
    transport.close()
    if options.rank == 0:
        where = environment_of(device, slice_="50 % by MPS" if options.slices and device.type == "cuda" else "")
        write_text(options.out / "found.json", dump_json({"environment": where, "rows": rows}))
    dist.barrier()
    dist.destroy_process_group()


def row(transport: Transport, nbytes: int, rank: int, device: torch.device, seconds: float) -> Row:
    message = (TensorShape(shape=(nbytes,), dtype=torch.uint8),)
    value = torch.ones(nbytes, dtype=torch.uint8, device=device)
    count = min(max(STREAM[0], STREAM_BYTES // nbytes), STREAM[1])
    messages = dict.fromkeys(range(count), message)

    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def ping_pong() -> None:
        if rank == 0:
            coming = transport.receive(BACK, message)
            sent = transport.send(THERE, [value])
            coming()
            settle()
            sent()
        else:
            transport.send(BACK, transport.receive(THERE, message)())()

    def stream(directions: tuple[P2PChannel, ...]) -> None:
        inboxes = [Inbox(transport, channel) for channel in directions if channel.to_rank == rank]
        outboxes = [Outbox(transport, channel) for channel in directions if channel.from_rank == rank]
        for inbox in inboxes:
            inbox.begin(range(count), messages)
        for outbox in outboxes:
            outbox.begin(answered=False)
        for number in range(count):
            for outbox in outboxes:
                outbox.send(number, [value])
            for inbox in inboxes:
                inbox.take(number)
        for outbox in outboxes:
            outbox.flush()
        settle()
        # Who only sends is done when the other has it all; gloo's barrier costs as much as a small message.
        dist.barrier()

    halved = [sample / 2 for sample in samples(ping_pong, seconds)]
    one_way = [sample / count for sample in samples(lambda: stream((THERE,)), seconds)]
    both_ways = [sample / count for sample in samples(lambda: stream((THERE, BACK)), seconds)]
    return Row(
        transport=transport.name,
        nbytes=nbytes,
        latency=summarise(halved),
        one_way=summarise(one_way),
        both_ways=summarise(both_ways),
    )


def samples(action: Callable[[], None], seconds: float) -> list[float]:
    """Times of as many calls as the first rank has time for; both ranks do as many."""
    action()
    begun = time.perf_counter()
    action()
    count = torch.tensor([min(max(7, int(seconds / (time.perf_counter() - begun))), 500)])
    dist.broadcast(count, 0)
    taken: list[float] = []
    for _ in range(int(count)):
        start = time.perf_counter()
        action()
        taken.append(time.perf_counter() - start)
    dist.barrier()
    return taken


def table(rows: list[dict[str, Any]], about: dict[str, Any]) -> str:
    """Markdown; medians."""
    lines = [
        "| transport | message | latency | one way | both ways, each |",
        "|---|---|---|---|---|",
    ]
    for found in rows:
        size = found["nbytes"]
        lines.append(
            f"| {found['transport']} | {size // 1024} KiB | {format_seconds(found['latency']['median'])} "
            f"| {format_bandwidth(size / found['one_way']['median'])} "
            f"| {format_bandwidth(size / found['both_ways']['median'])} |"
        )
    where = [
        f"- {name}: {said['name']}{', ' + said['slice'] if said['slice'] else ''}, torch {said['torch']}"
        for name, said in about.items()
    ]
    return "\n".join([*where, "", *lines]) + "\n"


if __name__ == "__main__":
    main()
