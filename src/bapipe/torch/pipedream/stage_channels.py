"""The P2P channels of one stage in a run of any length: what comes in and goes out on both sides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bapipe.schedule.actions import Schedule
from bapipe.torch.comm import Inbox, Message, Outbox, P2PChannel, Transport
from bapipe.torch.runtime.build_stages import OwnStages

__all__ = ["StageChannels"]


class _Messages(Mapping[int, Message]):
    """What crosses a boundary for every micro-batch: the same again and again."""

    def __init__(self, by_place: Sequence[Message], total: int) -> None:
        self._by_place = by_place
        self._total = total

    def __getitem__(self, microbatch: int) -> Message:
        return self._by_place[microbatch % len(self._by_place)]

    def __len__(self) -> int:
        return self._total

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._total))


class StageChannels:
    """Activations from the stage before, gradients from the next, and what goes to them; None: nothing crosses."""

    def __init__(
        self, stage: int, schedule: Schedule, own: OwnStages, sizes: Sequence[int], transport: Transport
    ) -> None:
        """Of one stage per rank; `sizes` are the micro-batches' of one global batch, which come again in turn."""
        self._schedule, self._own, self._sizes, self._transport = schedule, own, tuple(sizes), transport
        self.activations_in = self._inbox(stage - 1, onward=True)
        self.gradients_in = self._inbox(stage, onward=False)
        self.activations_out = self._outbox(stage, onward=True)
        self.gradients_out = self._outbox(stage - 1, onward=False)

    def _crossing(self, boundary: int, onward: bool) -> list[Message]:
        """Each micro-batch's message; empty where there is no such boundary, or nothing crosses."""
        if not 0 <= boundary < self._schedule.num_stages - 1:
            return []
        messages = [self._own.message(boundary, size, onward) for size in self._sizes]
        return messages if any(messages) else []

    def _channel(self, boundary: int, onward: bool) -> P2PChannel:
        before, after = (ranks[0] for ranks in self._schedule.placement[boundary : boundary + 2])
        ends = (before, after) if onward else (after, before)
        return P2PChannel(boundary=boundary, onward=onward, from_rank=ends[0], to_rank=ends[1])

    def _inbox(self, boundary: int, *, onward: bool) -> Inbox | None:
        if not self._crossing(boundary, onward):
            return None
        return Inbox(self._transport, self._channel(boundary, onward))

    def _outbox(self, boundary: int, *, onward: bool) -> Outbox | None:
        if not self._crossing(boundary, onward):
            return None
        return Outbox(self._transport, self._channel(boundary, onward))

    def begin(self, total: int) -> None:
        """So many micro-batches come, in order."""
        for inbox in (self.activations_in, self.gradients_in):
            if inbox is not None:
                by_place = self._crossing(inbox.channel.boundary, inbox.channel.onward)
                inbox.begin(range(total), _Messages(by_place, total))
        if self.activations_out is not None:
            self.activations_out.begin(answered=self.gradients_in is not None)
        if self.gradients_out is not None:
            self.gradients_out.begin(answered=False)

    def flush(self) -> None:
        """Wait until all that was sent is delivered."""
        for outbox in (self.activations_out, self.gradients_out):
            if outbox is not None:
                outbox.flush()
