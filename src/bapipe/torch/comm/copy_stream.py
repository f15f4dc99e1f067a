"""Copies on a stream of their own, in order with the compute but not in its way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from bapipe.torch.comm.channel import Message

__all__ = ["CopyStream"]


class CopyStream:
    """A CUDA stream that copies, for one direction of one channel: a copy that waits must not hold up
    another's."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Before compute that is queued already: a peer waits for the copy.
        self.stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    def here(self) -> torch.cuda.Event:
        """The point that the caller's current stream has come to."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(
        self, pairs: Iterable[tuple[Tensor, Tensor]], *, after: torch.cuda.Event | None = None
    ) -> torch.cuda.Event:
        """Queue copies of the second tensor of each pair into the first; the event says when they are done.

        The caller keeps device tensors until then. Pinned host memory torch keeps by itself.
        """
        with torch.cuda.stream(self.stream), torch.no_grad():
            if after is not None:
                self.stream.wait_event(after)
            for into, value in pairs:
                if value.numel():
                    into.copy_(value, non_blocking=True)
            # `blocking` lets a thread that waits sleep instead of spin.
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record(self.stream)
        return done

    def fresh(self, message: Message) -> tuple[Tensor, ...]:
        """New tensors that this stream may fill at once; hand them on with `adopt`."""
        with torch.cuda.stream(self.stream):
            return tuple(about.empty(self._device) for about in message)

    def adopt(self, values: Sequence[Tensor], done: torch.cuda.Event) -> None:
        """The caller's current stream waits for the copies, and memory it still uses is not given out again."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(done)
        for value in values:
            value.record_stream(current)
