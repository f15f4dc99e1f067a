"""V-shaped orders made for given times and memory: what is ready runs by some preference, and W fills the gaps.

The published orders (`bapipe.schedule.v_shape`) assume that all stages and kinds of action take as long. Where
they do not, several are made, one by each preference, and whoever asks takes the fastest by simulation that fits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from bapipe.schedule.actions import Kind, Schedule
from bapipe.schedule.channel_window import stops_at
from bapipe.schedule.inflight import v_activations
from bapipe.schedule.lane_builders import require_sizes
from bapipe.schedule.list_schedule import StageTimes
from bapipe.schedule.v_shape import dualpipe_v, v_half, v_min, v_schedule, zb_v
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.network import Network
from bapipe.simulator.simulate import simulate

__all__ = ["V_CHOICES", "VChoice", "quickest_v_order", "v_order", "v_orders"]

_F, _B, _I, _W = int(Kind.F), int(Kind.B), int(Kind.I), int(Kind.W)
_NEVER = float("inf")
_PUBLISHED = {"zb-v": zb_v, "v-half": v_half, "v-min": v_min, "dualpipe-v": dualpipe_v}

_Step = Literal["F down", "F up", "I down", "I up"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VChoice:
    """What goes first where there is a choice; none is best for all times."""

    order: tuple[_Step, ...]
    gap: float
    """share of its length that must be free until the next input for a W to begin"""


V_CHOICES = (
    VChoice(order=("F up", "F down", "I up", "I down"), gap=0.0),
    VChoice(order=("I up", "F up", "F down", "I down"), gap=0.0),
    VChoice(order=("F up", "I down", "F down", "I up"), gap=0.7),
    VChoice(order=("F up", "I down", "I up", "F down"), gap=0.0),
    VChoice(order=("I down", "I up", "F up", "F down"), gap=0.7),
    VChoice(order=("I up", "F up", "I down", "F down"), gap=0.0),
)
"""of the 192 that differ in the order, in W's place among them and in the gap, those that together come closest to
the best of all on random times"""


def v_orders(
    name: str, stages: Sequence[StageTimes], num_microbatches: int, *, room: Sequence[float] | None = None
) -> Iterator[Schedule]:
    """Orders of 2N stages that hold no more than the named schedule: the published one and those by preference.

    `room`: bytes that each rank has for activations. The published order does not look at them; the others exceed
    them only by what a stage needs to go on at all. Of dualpipe-v there is the published order alone: it has no
    other meaning. All run on channels that hold few messages (`channel_window`). Cost: some microseconds per
    action and order.
    """
    require_sizes(len(stages) // 2, num_microbatches)
    ranks = len(stages) // 2
    assert len(stages) == 2 * ranks, "a V has two stages per rank"
    yield _PUBLISHED[name](ranks, num_microbatches)
    if name != "dualpipe-v":
        for choice in V_CHOICES:
            order = v_order(name, stages, num_microbatches, choice, room=room)
            if not stops_at(order):
                yield order


def v_order(
    name: str,
    stages: Sequence[StageTimes],
    num_microbatches: int,
    choice: VChoice,
    *,
    room: Sequence[float] | None = None,
) -> Schedule:
    """The order of 2N stages by one preference; as `v_orders` has it, but it may stop on channels that hold few
    messages."""
    ranks = len(stages) // 2
    most = v_activations(name, ranks)
    return _listed(name, stages, num_microbatches, most, room or [_NEVER] * ranks, choice)


def quickest_v_order(
    name: str, costs: Costs, num_microbatches: int, *, network: Network | None = None
) -> Schedule:
    """Of `v_orders`, the one that takes least time; the published one unless another takes less."""
    sends = zip((*costs.send_forward, 0.0), (0.0, *costs.send_backward), strict=True)
    stages = [
        StageTimes(
            forward=forward,
            input_gradient=first,
            weight_gradient=second,
            send_forward=ahead,
            send_backward=back,
        )
        for forward, first, second, (ahead, back) in zip(
            costs.forward, costs.input_gradient, costs.weight_gradient, sends, strict=True
        )
    ]
    orders = v_orders(name, stages, num_microbatches)
    return min(orders, key=lambda order: simulate(order, costs, network).time)


def _listed(
    name: str, stages: Sequence[StageTimes], count: int, most: int, room: Sequence[float], preference: VChoice
) -> Schedule:
    """The order in which ranks that always run what comes first, as they prefer it, go through their actions."""
    last = len(stages) - 1
    ranks = [_VRank((rank, last - rank), stages, count, most, own, preference) for rank, own in enumerate(room)]
    ranks[0].halves[0].forward_at = [0.0] * count
    options = [rank.option() for rank in ranks]
    for _ in range(sum(3 if stage.weight_gradient else 2 for stage in stages) * count):
        start, _, kind, half = soonest = min(options)
        assert start < _NEVER, "every rank waits for another"
        index = options.index(soonest)
        stage, microbatch, end = ranks[index].run(start, kind, half)
        target = stage + 1 if kind == _F else stage - 1 if kind in (_I, _B) else -1
        if kind == _F and stage == last:
            ranks[index].halves[1].backward_at[microbatch] = end
        elif 0 <= target <= last:
            peer = min(target, last - target)
            line = ranks[peer].halves[int(target > last // 2)]
            sent = stages[stage].send_forward if kind == _F else stages[stage].send_backward
            there = end + (sent if peer != index else 0.0)
            (line.forward_at if kind == _F else line.backward_at)[microbatch] = there
            options[peer] = ranks[peer].option()
        options[index] = ranks[index].option()
    return v_schedule(name, [rank.actions for rank in ranks], count)


class _VHalf:
    """One stage of a rank while the order is made."""

    __slots__ = ("backward_at", "forward_at", "forwards", "inputs", "stage", "times", "weights")

    def __init__(self, stage: int, times: StageTimes, count: int) -> None:
        self.stage, self.times = stage, times
        self.forward_at = [_NEVER] * count
        """when each micro-batch's input is there"""
        self.backward_at = [_NEVER] * count
        self.forwards = self.inputs = self.weights = 0
        """how many F, I and W are done"""

    @property
    def bytes(self) -> float:
        """What its micro-batches hold, or will hold before they let go."""
        waiting = self.inputs - self.weights
        return (self.forwards - self.inputs) * self.times.most + waiting * self.times.delayed


class _VRank:
    """One rank while the order is made.

    A forward on the way down leaves room for one on the way up, so that the oldest micro-batch always gets through
    to its backward: no order waits for ever.
    """

    def __init__(
        self,
        own: tuple[int, int],
        stages: Sequence[StageTimes],
        count: int,
        most: int,
        room: float,
        preference: VChoice,
    ) -> None:
        self.halves = tuple(_VHalf(stage, stages[stage], count) for stage in own)
        self.actions: list[tuple[int, int, int]] = []
        """kind, stage and micro-batch"""
        self._count, self._most, self._room, self._gap = count, most, room, preference.gap
        place = {step: at for at, step in enumerate(preference.order)}
        self._forward_place = (place["F down"], place["F up"])
        self._backward_place = (place["I down"], place["I up"])
        self._free = 0.0

    def option(self) -> tuple[float, int, int, int]:
        """When it would begin what next, by what is known: start, preference, kind and half."""
        now, due = self._free, self._oldest_weight()
        best, lacks_room = (_NEVER, 9, _W, 0), False
        for half, own in enumerate(self.halves):
            at = own.forwards
            if at < self._count and own.forward_at[at] < _NEVER:
                start = max(now, own.forward_at[at])
                if self._fits(half):
                    best = min(best, (start, self._forward_place[half], _F, half))
                else:
                    lacks_room = lacks_room or start == now
            at = own.inputs
            if at < own.forwards and own.backward_at[at] < _NEVER:
                best = min(best, (max(now, own.backward_at[at]), self._backward_place[half], _I, half))
        if due is not None:
            gap, needed = best[0] - now, self.halves[due].times.weight_gradient
            if gap > 0 and (lacks_room or gap == _NEVER or gap >= self._gap * needed):
                return now, 9, _W, due
        return best

    def run(self, start: float, kind: int, half: int) -> tuple[int, int, float]:
        """Do what was chosen; its stage, its micro-batch and its end."""
        own = self.halves[half]
        if kind == _F:
            microbatch, end = own.forwards, start + own.times.forward
            own.forwards += 1
        elif kind == _I:
            microbatch, end = own.inputs, start + own.times.input_gradient
            own.inputs += 1
            if not own.times.weight_gradient:
                own.weights += 1
                kind = _B
        else:
            microbatch, end = own.weights, start + own.times.weight_gradient
            own.weights += 1
        self._free = end
        self.actions.append((kind, own.stage, microbatch))
        return own.stage, microbatch, end

    def _oldest_weight(self) -> int | None:
        """The half whose weight gradient has waited longest, by micro-batch."""
        due = [(own.weights, -half) for half, own in enumerate(self.halves) if own.weights < own.inputs]
        return -min(due)[1] if due else None

    def _fits(self, half: int) -> bool:
        """Whether there is memory for a forward; there always is for the oldest micro-batch."""
        down, up = self.halves
        held = [own.forwards - own.weights for own in self.halves]
        if not held[1] and (half or not held[0]):
            return True
        if sum(held) >= self._most or down.bytes + up.bytes + self.halves[half].times.most > self._room:
            return False
        return bool(half) or (
            held[0] + 1 < self._most and down.bytes + down.times.most + up.times.most <= self._room
        )
