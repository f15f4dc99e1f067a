"""Links slower than those there are: messages and sums of gradients arrive as late as they would over them.

Nothing is computed or carried otherwise; what comes early is held back. Each direction between two ranks is a link
of its own, and every rank's sums go over one of the same rate: 2(n−1)/n of the bytes, one sum after another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

import bapipe.torch.runtime.gradient_sync
import bapipe.torch.runtime.rank_engine
from bapipe.torch.comm import Message, P2PChannel, Transport
from bapipe.torch.comm.choose_transport import Connection, connect
from bapipe.torch.comm.worker_thread import WorkerThread, close_lanes, result_of

__all__ = ["SlowTransport", "slow_down"]


def _wait_until(moment: float) -> None:
    left = moment - time.perf_counter()
    if left > 0:
        time.sleep(left)


class SlowTransport:
    """A transport over links of `rate` bytes a second."""

    def __init__(self, inner: Transport, rate: float, *, timeout: float = 120.0) -> None:
        self.name = f"{inner.name}, emulated at {rate / 1e9:g} GB/s"
        self._inner, self._rate, self._timeout = inner, rate, timeout
        self._lanes: dict[P2PChannel, WorkerThread] = {}
        self._free: dict[tuple[int, int], float] = {}
        """(from, to) -> when the link has carried what has come so far"""

    def receive(self, channel: P2PChannel, message: Message) -> Callable[[], tuple[Tensor, ...]]:
        wait = self._inner.receive(channel, message)
        if channel not in self._lanes:
            self._lanes[channel] = WorkerThread(
                f"emulated {channel.from_rank} to {channel.to_rank}, tag {channel.tag}"
            )

        def hold(held: Future[tuple[tuple[Tensor, ...], float]]) -> None:
            values = wait()
            size = sum(value.numel() * value.element_size() for value in values)
            pair = channel.from_rank, channel.to_rank
            self._free[pair] = max(time.perf_counter(), self._free.get(pair, 0.0)) + size / self._rate
            held.set_result((values, self._free[pair]))

        held = self._lanes[channel].submit(hold)

        def arrived() -> tuple[Tensor, ...]:
            values, moment = result_of(held, channel.from_rank, self._timeout)
            _wait_until(moment)
            return values

        return arrived

    def send(self, channel: P2PChannel, values: Sequence[Tensor]) -> Callable[[], None]:
        return self._inner.send(channel, values)

    def close(self) -> None:
        close_lanes(self._lanes.values(), self._inner.close)
        self._inner.close()


class _LateWork:
    """A sum that is done no earlier than its link would allow."""

    def __init__(self, work: dist.Work | None, moment: float) -> None:
        self._work, self._moment = work, moment

    def wait(self) -> bool:
        if self._work is not None:
            self._work.wait()
        _wait_until(self._moment)
        return True


class _SlowSums:
    """torch.distributed, whose all_reduce takes as long as over the link."""

    def __init__(self, rate: float) -> None:
        self._rate, self._free = rate, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, tensor: Tensor, *, group: Any = None, async_op: bool = False) -> _LateWork | None:
        count = dist.get_world_size(group)
        seconds = 2 * (count - 1) / count * tensor.numel() * tensor.element_size() / self._rate
        self._free = max(time.perf_counter(), self._free) + seconds
        late = _LateWork(dist.all_reduce(tensor, group=group, async_op=True), self._free)
        if async_op:
            return late
        late.wait()
        return None


def slow_down(rate: float | None) -> None:
    """From now on runs of this process go over such links; None: over those there are."""

    def slow(*args: Any, **kwargs: Any) -> Connection:
        made = connect(*args, **kwargs)
        return made if rate is None else replace(made, transport=SlowTransport(made.transport, rate))

    bapipe.torch.runtime.rank_engine.connect = slow
    bapipe.torch.runtime.gradient_sync.dist = dist if rate is None else _SlowSums(rate)  # type: ignore[assignment,attr-defined]
