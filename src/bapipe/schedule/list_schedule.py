"""A zero-bubble order made for given times: whatever is ready runs, and W fills the gaps that are long enough.

The fixed patterns of `bapipe.schedule.zero_bubble` put every W so many micro-batches behind its I. Where stages
differ, in their times or in how much of their backward is W, a W is better deferred until the stage would wait:

    0  F0 F1 F2 F3 F4 F5 I0 I1 W0 I2 W1 …      a first stage has no error to send, and its W can wait longest
    1     F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 …      a stage without W has nothing to fill gaps with

So later stages are fed at the rate of the first one's forwards, and it may have more work than they.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from bapipe.schedule.actions import Kind, Schedule
from bapipe.schedule.lane_builders import pipeline_schedule, require_sizes

__all__ = ["Preference", "StageTimes", "timed_order"]

_F, _B, _I, _W = int(Kind.F), int(Kind.B), int(Kind.I), int(Kind.W)
_NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """What an order is made for, of one stage."""

    forward: float
    input_gradient: float
    weight_gradient: float
    """0: the backward is done whole, as B"""
    send_forward: float = 0.0
    """seconds to the next stage, where that is on another rank; of the last one not used"""
    send_backward: float = 0.0
    """seconds to the stage before, where that is on another rank; of the first one not used"""
    cap: int = sys.maxsize
    """micro-batches that may wait for their I"""
    inflight: float = 0.0
    """bytes of each of them"""
    delayed: float = 0.0
    """bytes of each that waits for its W"""
    room: float = float("inf")
    """bytes for all of them"""
    tail: float = 0.0
    """seconds from its last action until it is ready for the next global batch"""
    answered: bool = True
    """whether a gradient comes back from the next stage; of the last one not used"""

    @property
    def most(self) -> float:
        """Bytes of a micro-batch from its forward to its last gradient, at most."""
        return max(self.inflight, self.delayed if self.weight_gradient else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """What goes first where there is a choice; none is best for all stages."""

    forward_first: bool
    """F before I where both are ready"""
    gap: float
    """share of its length that must be free until the next input for a W to begin"""


def timed_order(
    stages: Sequence[StageTimes], num_microbatches: int, preference: Preference
) -> tuple[Schedule, float]:
    """The order, and seconds until all is done. Cost: actions · stages.

    Memory is kept to by doing W first, except for the last micro-batch that a stage must hold to go on at all.
    """
    require_sizes(len(stages), num_microbatches)
    lines = [_Line(item, num_microbatches, preference) for item in stages]
    lines[0].forward_at = [0.0] * num_microbatches
    options = [line.option() for line in lines]
    last = len(lines) - 1
    for _ in range(sum(3 if item.weight_gradient else 2 for item in stages) * num_microbatches):
        begins = min(options)
        index = options.index(begins)
        start, kind = begins
        assert start < _NEVER, "every stage waits for another"
        line = lines[index]
        if kind == _F:
            number = line.forwards
            line.forwards += 1
            end = start + line.times.forward
            if index < last:
                lines[index + 1].forward_at[number] = end + line.times.send_forward
                options[index + 1] = lines[index + 1].option()
            if index == last or not line.times.answered:
                line.backward_at[number] = end
        elif kind == _I:
            number = line.inputs
            line.inputs += 1
            if not line.times.weight_gradient:
                line.weights += 1
                kind = _B
            end = start + line.times.input_gradient
            if index and lines[index - 1].times.answered:
                lines[index - 1].backward_at[number] = end + line.times.send_backward
                options[index - 1] = lines[index - 1].option()
        else:
            number = line.weights
            line.weights += 1
            end = start + line.times.weight_gradient
        line.free = end
        line.actions.append((kind, number))
        options[index] = line.option()
    actions, held = [line.actions for line in lines], [line.most_held() for line in lines]
    schedule = pipeline_schedule(actions, num_microbatches, name="zb", caps=held)
    return schedule, max(line.free + line.times.tail for line in lines)


class _Line:
    """One stage while the order is made."""

    __slots__ = (
        "actions",
        "backward_at",
        "count",
        "forward_at",
        "forwards",
        "free",
        "inputs",
        "prefers",
        "times",
        "weights",
    )

    def __init__(self, times: StageTimes, count: int, prefers: Preference) -> None:
        self.times, self.count, self.prefers = times, count, prefers
        self.forward_at = [_NEVER] * count
        """when each micro-batch's input is there"""
        self.backward_at = [_NEVER] * count
        self.free = 0.0
        self.forwards = self.inputs = self.weights = 0
        """how many F, I and W are done"""
        self.actions: list[tuple[int, int]] = []

    def option(self) -> tuple[float, int]:
        """When it would begin what next, by what is known; never, where all is done or nothing known to come."""
        times, now = self.times, self.free
        inflight, waiting = self.forwards - self.inputs, self.inputs - self.weights
        ahead = back = _NEVER
        if self.forwards < self.count and inflight < times.cap:
            after = max(
                (inflight + 1) * times.inflight + waiting * times.delayed,
                inflight * times.inflight + times.delayed,
            )
            if after <= times.room or not (inflight or waiting):
                ahead = max(now, self.forward_at[self.forwards])
            elif waiting and self.forward_at[self.forwards] <= now:
                return now, _W  # which is what the forward lacks room for
        if inflight and (
            not waiting or (inflight - 1) * times.inflight + (waiting + 1) * times.delayed <= times.room
        ):
            back = max(now, self.backward_at[self.inputs])
        first = min(ahead, back)
        if waiting and first > now:
            gap = first - now
            if gap == _NEVER or gap >= self.prefers.gap * times.weight_gradient:
                return now, _W
        if ahead <= now and back <= now:
            return now, _F if self.prefers.forward_first else _I
        return first, _F if ahead <= back else _I

    def most_held(self) -> int:
        """Micro-batches at once, from F to the end of their backward."""
        changes = ({_F: 1, _I: 0}.get(kind, -1) for kind, _ in self.actions)
        return max(itertools.accumulate(changes))
