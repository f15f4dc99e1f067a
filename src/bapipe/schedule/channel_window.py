"""Whether an order runs to its end on channels that hold a bounded number of messages.

The runtime posts `AHEAD` receives on every channel and one more for each message taken. A message is delivered
when its receive is posted. Of messages that nobody answers (gradients, activations over a boundary that no
gradient comes back over, and everything in an evaluation) a rank has at most `WINDOW` under way, and then waits
for the oldest to be delivered; other activations in training are answered by their gradient and wait for nothing.
So a rank that sends much before its peer takes anything may stop:

    rank 0   0F0 … 0F6 2F0 … 2F6 2B0 … 2B6 0B0 … 0B6
    rank 1   1F0 … 1F6 3F0 … 3F6 3B0 … 3B5 1B0 … 1B5 3B6 1B6

Rank 1 stops when it sends the gradient of 1B5: rank 0 takes none of them before 2B6, which waits for 3B6.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bapipe.schedule.actions import Action, Kind, Schedule

__all__ = ["AHEAD", "WINDOW", "ChannelBounds", "evaluation_order", "stops_at"]

AHEAD = 2
"""receives posted before they are needed"""
WINDOW = 3
"""messages without an answer that may be under way before the oldest is waited for"""

_Channel = tuple[int, bool, int, int]
"""boundary, onward, from rank, to rank"""
_BACKWARD = (Kind.B, Kind.I)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelBounds:
    """How many messages a channel holds; by default as in the runtime."""

    ahead: int = AHEAD
    """receives posted before they are needed, at least 1"""
    window: int = WINDOW
    """messages without an answer that may be under way"""


class _BoundedChannel:
    """One channel: what was sent, in order, and how many of them were taken."""

    def __init__(self, bounds: ChannelBounds) -> None:
        self._bounds = bounds
        self.places: dict[int, int] = {}
        """micro-batch -> its place among the messages"""
        self.taken = 0

    def take(self, microbatch: int) -> bool:
        """Take messages up to that one, as they come; where it has not been sent all that were, and False."""
        place = self.places.get(microbatch)
        self.taken = max(self.taken, len(self.places) if place is None else place + 1)
        return place is not None

    @property
    def blocks(self) -> bool:
        """Whether the sender of the last one still waits: more than the window are under way, and the oldest of
        them has no receive posted."""
        return len(self.places) - self._bounds.window > self.taken + self._bounds.ahead


class _OrderRun:
    """Every rank's actions, as far as they get."""

    def __init__(
        self,
        schedule: Schedule,
        orders: Mapping[int, Sequence[Action]],
        *,
        training: bool,
        bounds: ChannelBounds,
        unanswered: Collection[int] = (),
    ) -> None:
        self._schedule = schedule
        self._orders = orders
        self._training = training
        self._bounds = bounds
        self._unanswered = frozenset(unanswered)
        self._channels: dict[_Channel, _BoundedChannel] = {}
        self._handed: set[tuple[int, bool, int]] = set()
        """results for another stage of the same rank"""
        self.done = dict.fromkeys(orders, 0)
        """actions that each rank has run"""
        self._waits: dict[int, _BoundedChannel] = {}
        """ranks whose last send is not over"""

    def to_the_end(self) -> bool:
        """Run all ranks as far as they get; whether that is to their end."""
        ready = deque(self._orders)
        while ready:
            moved = self._advance(ready.popleft())
            ready.extend(rank for rank in moved if rank not in ready)
        return not self.stuck()

    def stuck(self) -> dict[int, Action]:
        """Ranks that do not get to their end, and the action whose input or whose sending they wait for."""
        found = {}
        for rank, order in self._orders.items():
            held = self._waits.get(rank)
            if held is not None and held.blocks:
                found[rank] = order[self.done[rank] - 1]
            elif self.done[rank] < len(order):
                found[rank] = order[self.done[rank]]
        return found

    def _advance(self, rank: int) -> set[int]:
        """Run a rank as far as it gets; the ranks that may go on by that."""
        touched: set[int] = set()
        order = self._orders[rank]
        while self.done[rank] < len(order):
            held = self._waits.get(rank)
            if held is not None:
                if held.blocks:
                    break
                del self._waits[rank]
            action = order[self.done[rank]]
            if not self._take(rank, action, touched):
                break
            self.done[rank] += 1
            self._send(rank, action, touched)
        return touched

    def _take(self, rank: int, action: Action, touched: set[int]) -> bool:
        source = self._neighbour(action, -1)
        if source is None:
            return True
        boundary, onward, peer = source
        assert action.microbatch is not None
        if peer == rank:
            return (boundary, onward, action.microbatch) in self._handed
        channel = self._channels.setdefault((boundary, onward, peer, rank), _BoundedChannel(self._bounds))
        before = channel.taken
        there = channel.take(action.microbatch)
        if channel.taken > before:
            touched.add(peer)
        return there

    def _send(self, rank: int, action: Action, touched: set[int]) -> None:
        target = self._neighbour(action, 1)
        if target is None:
            return
        boundary, onward, peer = target
        assert action.microbatch is not None
        if peer == rank:
            self._handed.add((boundary, onward, action.microbatch))
            return
        channel = self._channels.setdefault((boundary, onward, rank, peer), _BoundedChannel(self._bounds))
        channel.places[action.microbatch] = len(channel.places)
        touched.add(peer)
        if not (self._training and onward and boundary not in self._unanswered):
            self._waits[rank] = channel

    def _neighbour(self, action: Action, way: int) -> tuple[int, bool, int] | None:
        """(boundary, onward, rank) that an action takes from (-1) or sends to (+1); None where there is none."""
        if action.microbatch is None or action.kind not in (Kind.F, *_BACKWARD):
            return None
        onward = action.kind == Kind.F
        step = way if onward else -way
        other = action.stage + step
        boundary = min(action.stage, other)
        if not 0 <= other < self._schedule.num_stages or (not onward and boundary in self._unanswered):
            return None
        return boundary, onward, self._schedule.rank_of(other, action.microbatch)


def _orders(schedule: Schedule, kinds: Iterable[Kind]) -> dict[int, list[Action]]:
    wanted = set(kinds)
    found: dict[int, list[Action]] = {rank: [] for rank in range(schedule.num_ranks)}
    for lane in schedule.lanes:
        if lane.name != "all-reduce":
            found[lane.rank] += [action for action in lane if action.kind in wanted]
    return found


def stops_at(
    schedule: Schedule, *, bounds: ChannelBounds | None = None, unanswered: Collection[int] = ()
) -> dict[int, Action]:
    """The actions at which ranks would stop for ever in training; empty where all get to their end.

    For orders of one computing lane per rank that are right otherwise (`validate.check`). `unanswered` are the
    boundaries over which no gradient comes back, such as behind a frozen stage: activations there are bounded,
    too. Linear in the actions.
    """
    kinds = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)
    run = _OrderRun(
        schedule,
        _orders(schedule, kinds),
        training=True,
        bounds=bounds or ChannelBounds(),
        unanswered=unanswered,
    )
    run.to_the_end()
    return run.stuck()


def evaluation_order(schedule: Schedule, *, bounds: ChannelBounds | None = None) -> dict[int, list[Action]]:
    """In which order each rank runs its forwards in an evaluation, where nothing is answered.

    As in training where that gets to its end; else one micro-batch after the other, which always does.
    """
    orders = _orders(schedule, (Kind.F,))
    if _OrderRun(schedule, orders, training=False, bounds=bounds or ChannelBounds()).to_the_end():
        return orders
    return {
        rank: sorted(order, key=lambda action: (action.microbatch or 0, action.stage))
        for rank, order in orders.items()
    }
