"""Counts what is alive while a rank trains, without asking the runtime: autograd graphs and boundary tensors."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

__all__ = ["Living", "boundary_tensors", "count_tensors", "watch_graphs"]


class Living:
    """How many of the things it was shown are alive now, and were at most."""

    def __init__(self) -> None:
        self._alive: dict[int, weakref.ref[Any]] = {}
        self.peak = 0

    def add(self, thing: Any) -> None:
        key = id(thing)
        self._alive[key] = weakref.ref(thing, lambda _: self._alive.pop(key, None))
        self.peak = max(self.peak, self.now)

    @property
    def now(self) -> int:
        return len(self._alive)


class _Token:
    """Put into a node of an autograd graph: dies with it."""


def watch_graphs(module: nn.Module, graphs: Living) -> None:
    """Count the graphs that the module's forwards leave behind."""

    def after(_: nn.Module, __: Any, made: Any) -> None:
        for value in made:
            if isinstance(value, Tensor) and value.grad_fn is not None:
                token = _Token()
                value.grad_fn.metadata["bapipe test"] = token
                graphs.add(token)
                return

    module.register_forward_hook(after)


@contextlib.contextmanager
def boundary_tensors(received: Living, sent: Living) -> Iterator[None]:
    """Count the tensors that go through torch.distributed's point-to-point calls."""
    receive, send = dist.irecv, dist.isend

    def watched_receive(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        received.add(tensor)
        return receive(tensor, *args, **kwargs)

    def watched_send(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.add(tensor)
        return send(tensor, *args, **kwargs)

    dist.irecv, dist.isend = watched_receive, watched_send
    try:
        yield
    finally:
        dist.irecv, dist.isend = receive, send


def count_tensors(goal: int | None = None, *, seconds: float = 30.0) -> int:
    """Tensors that Python knows of, those frozen by `gc.freeze` left out.

    With a goal it is waited for: gloo's threads let go of an all-reduce just after it has ended.
    """
    end = time.monotonic() + seconds
    while True:
        count = sum(issubclass(type(item), Tensor) for item in gc.get_objects())
        if goal is None or count <= goal or time.monotonic() > end:
            return count
        time.sleep(0.02)
