"""The ranks of the transports' tests: processes that stay, and do one case after another."""

from __future__ import annotations

import datetime
import gc
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.torch.comm import (
    GlooTransport,
    Inbox,
    IpcTransport,
    LinkError,
    Message,
    NcclTransport,
    Outbox,
    P2PChannel,
    StagedTransport,
    TensorShape,
    Transport,
)

WORLD = 3
FIRST = P2PChannel(boundary=0, onward=True, from_rank=0, to_rank=1)
SECOND = P2PChannel(boundary=1, onward=True, from_rank=1, to_rank=2)
BESIDE = P2PChannel(boundary=2, onward=True, from_rank=0, to_rank=1)
"""a second boundary between the ranks of the first"""
CHANNELS = tuple(channel for onward in (FIRST, SECOND, BESIDE) for channel in (onward, onward.reverse))
MIXED: Message = (
    TensorShape(shape=(3, 5), dtype=torch.float32),
    TensorShape(shape=(7,), dtype=torch.bool),
    TensorShape(shape=(), dtype=torch.int64),
    TensorShape(shape=(2, 0, 4), dtype=torch.bfloat16),
    TensorShape(shape=(33,), dtype=torch.bfloat16),
    TensorShape(shape=(2, 3), dtype=torch.float64),
)
TOKEN: Message = (TensorShape(shape=(1,), dtype=torch.int64),)
LARGE = 2**21
"""bytes of a message whose memory is counted"""

Fact = dict[str, Any]


class Here:
    """What a case works with."""

    def __init__(self, name: str, rank: int, device: torch.device, transport: Transport) -> None:
        self.name = name
        self.rank = rank
        self.device = device
        self.transport = transport
        self.random = random.Random(rank)

    def boxes(self, channels: Sequence[P2PChannel]) -> tuple[dict[P2PChannel, Inbox], dict[P2PChannel, Outbox]]:
        """This rank's ends of the channels."""
        inboxes = {channel: Inbox(self.transport, channel) for channel in channels if channel.to_rank == self.rank}
        outboxes = {
            channel: Outbox(self.transport, channel) for channel in channels if channel.from_rank == self.rank
        }
        return inboxes, outboxes

    def nap(self) -> None:
        time.sleep(self.random.choice([0, 0, 0, 0.0005, 0.002]))

    def send_token(self, channel: P2PChannel, number: int) -> Callable[[], None]:
        return self.transport.send(channel, [torch.tensor([number], device=self.device)])


def content(message: Message, seed: int, device: torch.device) -> tuple[Tensor, ...]:
    """Numbers that every type holds exactly, and truths."""
    generator = torch.Generator().manual_seed(seed)
    values: list[Tensor] = []
    for about in message:
        low, high = (0, 2) if about.dtype == torch.bool else (-99, 99)
        values.append(torch.randint(low, high, about.shape, generator=generator).to(about.dtype).to(device))
    return tuple(values)


def seed_of(channel: P2PChannel, number: int) -> int:
    return 1000 * channel.tag + number


def check(values: Sequence[Tensor], message: Message, seed: int, device: torch.device) -> None:
    for value, wanted in zip(values, content(message, seed, torch.device("cpu")), strict=True):
        assert value.device == device
        assert (value.dtype, value.shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(value.cpu(), wanted)


def relayed(here: Here) -> Fact:
    """Messages of many types from the first rank by way of the second to the last."""
    numbers = range(40)
    inboxes, outboxes = here.boxes([FIRST, SECOND])
    for inbox in inboxes.values():
        inbox.begin(numbers, dict.fromkeys(numbers, MIXED))
    for outbox in outboxes.values():
        outbox.begin(answered=False)
    for number in numbers:
        values = content(MIXED, number, here.device)
        for inbox in inboxes.values():
            values = inbox.take(number)
            check(values, MIXED, number, here.device)
        for outbox in outboxes.values():
            outbox.send(number, values)
    for outbox in outboxes.values():
        outbox.flush()
    return {}


def both_ways(here: Here) -> Fact:
    """All channels between neighbours at once, at random moments, with messages whose memory is counted."""
    numbers, channels = range(30), [FIRST, FIRST.reverse, SECOND, SECOND.reverse]
    message = (TensorShape(shape=(LARGE // 4 - 64,), dtype=torch.float32), *MIXED[1:3])
    before = memory(here.device)
    if here.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(here.device)
    inboxes, outboxes = here.boxes(channels)
    for inbox in inboxes.values():
        inbox.begin(numbers, dict.fromkeys(numbers, message))
    for outbox in outboxes.values():
        outbox.begin(answered=False)
    for number in numbers:
        for channel, outbox in outboxes.items():
            here.nap()
            outbox.send(number, content(message, seed_of(channel, number), here.device))
        for channel, inbox in inboxes.items():
            here.nap()
            check(inbox.take(number), message, seed_of(channel, number), here.device)
    for outbox in outboxes.values():
        outbox.flush()
    peak = torch.cuda.max_memory_allocated(here.device) if here.device.type == "cuda" else before
    return {
        "in": max(inbox.peak for inbox in inboxes.values()),
        "out": max(outbox.peak for outbox in outboxes.values()),
        "messages": (peak - before) / LARGE,
    }


def answered(here: Here) -> Fact:
    """A pipeline's shape: the first rank is four messages ahead, and lets go of each when its error comes."""
    ahead, numbers = 4, range(20)
    inboxes, outboxes = here.boxes([FIRST, FIRST.reverse])
    for inbox in inboxes.values():
        inbox.begin(numbers, dict.fromkeys(numbers, MIXED))
    for outbox in outboxes.values():
        outbox.begin(answered=outbox.channel.onward)
    for number in range(len(numbers) + ahead):
        if here.rank == 0 and number in numbers:
            outboxes[FIRST].send(number, content(MIXED, number, here.device))
        if here.rank == 0 and number >= ahead:
            check(inboxes[FIRST.reverse].take(number - ahead), MIXED, number - ahead, here.device)
            outboxes[FIRST].release(number - ahead)
        if here.rank == 1 and number in numbers:
            here.nap()
            outboxes[FIRST.reverse].send(number, inboxes[FIRST].take(number))
    for outbox in outboxes.values():
        outbox.flush()
    return {"idle": all(box.idle for box in (*inboxes.values(), *outboxes.values())), "out": peaks(outboxes)}


def peaks(outboxes: dict[P2PChannel, Outbox]) -> list[int]:
    return [outbox.peak for outbox in outboxes.values()]


def reused(here: Here) -> Fact:
    """Memory that is let go as soon as it may be is overwritten at once; nobody may see that."""
    numbers, shape = range(1, 25), (2**19,)
    message = (TensorShape(shape=shape, dtype=torch.float32), TensorShape(shape=(64, 32), dtype=torch.float32))
    busy = torch.ones(1024, 1024, device=here.device)
    inboxes, outboxes = here.boxes([FIRST])
    counted = torch.arange(2048.0, device=here.device)
    good: list[Tensor] = []
    for inbox in inboxes.values():
        inbox.begin(numbers, dict.fromkeys(numbers, message))
    for outbox in outboxes.values():
        outbox.begin(answered=False)
    for number in numbers:
        for _ in range(20 if here.device.type == "cuda" else 0):
            busy = (busy @ busy).clamp(0, 1)
        for outbox in outboxes.values():
            value = torch.zeros(shape, device=here.device).add_(number)
            # A transposed one, because what is sent need not be contiguous.
            outbox.send(number, [value, counted.view(32, 64).t()])
            del value
        for inbox in inboxes.values():
            got, turned = inbox.take(number)
            good.append((got == number).all() & (turned.t().flatten() == counted).all())
            del got, turned
        torch.empty(shape, device=here.device).fill_(-1)
    for outbox in outboxes.values():
        outbox.flush()
    return {"good": [bool(value) for value in good]}


def growing(here: Here) -> Fact:
    """Messages of very different sizes on one channel."""
    sizes = (2**10, 2**20, 3 * 2**20, 10 * 2**20, 0, 2**10, 2**24, 2**10)
    messages = {n: (TensorShape(shape=(size,), dtype=torch.uint8),) for n, size in enumerate(sizes)}
    inboxes, outboxes = here.boxes([FIRST])
    for inbox in inboxes.values():
        inbox.begin(range(len(sizes)), messages)
    for outbox in outboxes.values():
        outbox.begin(answered=False)
    for number, size in enumerate(sizes):
        wanted = (torch.arange(size) % (7 + number)).to(torch.uint8)
        for outbox in outboxes.values():
            outbox.send(number, [wanted.to(here.device)])
        for inbox in inboxes.values():
            assert torch.equal(inbox.take(number)[0].cpu(), wanted)
    for outbox in outboxes.values():
        outbox.flush()
    return {}


def head_of_line(here: Here) -> Fact:
    """What waits on one channel holds up no other: neither receives that were posted before, nor sends."""
    transport = here.transport
    got: list[int] = []
    if here.rank == 0:
        held = here.send_token(FIRST, 1)
        sent = here.send_token(BESIDE, 2)
        (go,) = transport.receive(BESIDE.reverse, TOKEN)()
        last = here.send_token(FIRST, int(go))
        for wait in (held, sent, last):
            wait()
    if here.rank == 1:
        from_last = transport.receive(SECOND.reverse, TOKEN)
        got.append(int(transport.receive(BESIDE, TOKEN)()[0]))
        firsts = [transport.receive(FIRST, TOKEN) for _ in range(2)]
        got.append(int(firsts[0]()[0]))
        here.send_token(BESIDE.reverse, 3)()
        got.append(int(firsts[1]()[0]))
        here.send_token(SECOND, 4)()
        got.append(int(from_last()[0]))
    if here.rank == 2:
        (go,) = transport.receive(SECOND, TOKEN)()
        here.send_token(SECOND.reverse, int(go))()
    return {"got": got}


def outcome(wait: Callable[[], object]) -> Fact:
    """How a wait ends."""
    try:
        wait()
    except LinkError as error:
        return {"peer": error.peer, "late": error.late, "text": str(error)}
    return {"peer": None, "late": False, "text": "no error"}


def late(here: Here) -> Fact:
    """The second rank waits for messages that nobody sends, and sends what nobody receives."""
    found: list[Fact] = []
    if here.rank == 1:
        waits: list[Callable[[], object]] = [here.transport.receive(FIRST, MIXED) for _ in range(2)]
        waits.append(here.send_token(SECOND, 1))
        found = [outcome(wait) for wait in waits]
    with_all_ranks()
    return {"found": found}


def killed(here: Here) -> Fact:
    """The last rank dies while the second receives from it and sends to it; the first is no worse for it."""
    transport = here.transport
    found: list[Fact] = []
    if here.rank == 2:
        transport.receive(SECOND, TOKEN)()
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    if here.rank == 1:
        waits: list[Callable[[], object]] = [transport.receive(SECOND.reverse, MIXED) for _ in range(2)]
        here.send_token(SECOND, 0)()
        waits += [lambda: here.send_token(SECOND, 1)(), lambda: here.send_token(SECOND, 2)()]
        found = [outcome(wait) for wait in waits]
        found.append(outcome(lambda: transport.receive(SECOND.reverse, MIXED)()))
        here.send_token(FIRST.reverse, 5)()
    if here.rank == 0:
        assert int(transport.receive(FIRST.reverse, TOKEN)()[0]) == 5
    return {"found": found}


CASES: dict[str, Callable[[Here], Fact]] = {
    case.__name__: case
    for case in (relayed, both_ways, answered, reused, growing, head_of_line, late, killed)
}  # fmt: skip


def with_all_ranks() -> None:
    dist.barrier()


def memory(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.ipc_collect()
    return torch.cuda.memory_allocated(device)


def made(name: str, device: torch.device, timeout: float) -> Transport:
    if name == "gloo":
        return GlooTransport(dist.new_group(timeout=datetime.timedelta(seconds=timeout)))
    if name == "staged":
        return StagedTransport(device, timeout=timeout)
    if name == "ipc":
        return IpcTransport(device, timeout=timeout)
    return NcclTransport(CHANNELS, device, timeout=timeout)


def run_case(name: str, rank: int, device: torch.device, case: str, timeout: float) -> Fact:
    before = memory(device)
    # The transport's own timeout may be short: it is for the case, not for a rank that is slow to begin.
    with_all_ranks()
    transport = made(name, device, timeout)
    try:
        fact = CASES[case](Here(name, rank, device, transport))
    finally:
        transport.close()
    if case != "killed":
        with_all_ranks()
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("bapipe ")]
    return {**fact, "threads": threads, "left": memory(device) - before}


def serve(connection: Connection, folder: str, rank: int, name: str) -> None:
    """Do the cases that come, each as (name, timeout), until None comes."""
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    if name == "nccl" and torch.cuda.device_count() < WORLD:
        os.environ["NCCL_HOSTID"] = f"rank {rank}"  # ranks that share a GPU, as on slices
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if name != "gloo":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        torch.ones(64, 64, device=device).matmul(torch.ones(64, 64, device=device))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=WORLD,
        timeout=datetime.timedelta(seconds=60),
    )
    connection.send("ready")
    for case, timeout in iter(connection.recv, None):
        try:
            connection.send(run_case(name, rank, device, case, timeout))
        except Exception:
            connection.send({"failed": traceback.format_exc()})
    dist.destroy_process_group()
