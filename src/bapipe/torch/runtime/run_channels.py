"""All channels of a run, between whichever ranks."""

from __future__ import annotations

from collections.abc import Callable

from bapipe.schedule.actions import Schedule
from bapipe.torch.comm import Message, P2PChannel

__all__ = ["run_channels"]


def run_channels(schedule: Schedule, message: Callable[[int, bool], Message]) -> dict[P2PChannel, Message]:
    """Every channel over which something crosses, with its message, in the same order on every rank.

    `message` gives what crosses a boundary onward (activations) or back (gradients).
    """
    found: dict[P2PChannel, Message] = {}
    for boundary in range(schedule.num_stages - 1):
        for onward in (True, False):
            content = message(boundary, onward)
            if not content:
                continue
            for microbatch in range(schedule.num_microbatches):
                ends = [schedule.rank_of(stage, microbatch) for stage in (boundary, boundary + 1)]
                if ends[0] == ends[1]:
                    continue
                sender, receiver = ends if onward else reversed(ends)
                channel = P2PChannel(boundary=boundary, onward=onward, from_rank=sender, to_rank=receiver)
                found.setdefault(channel, content)
    return found
