"""An explicit model of ranks that run an order over a transport, explored apart from the checker that it judges.

Every rank, and every thread of a transport, is a process: a list of steps, each of which waits until some counters
are large enough and then adds to others. The steps are those of `torch/runtime/executor.py`,
`torch/comm/p2p_queues.py` and the transport:

    gloo            a send is posted at once and delivered when the receive of its number is posted
    staged          as gloo, by one thread per channel and end, message after message
    nccl            by one thread per channel and end: the announcement is delivered, then both ends launch
    ipc             two buffers: one thread fills them and announces, one takes them back when they were copied

Counters only grow, so a step that can be taken can still be taken after any other process has moved, and two such
steps lead to the same state in either order. Hence all maximal runs take the same steps and end in the same state
(as in a Kahn network; every set of one enabled step is persistent), and one run per order decides whether it
stops. `reachable_ends` explores all interleavings and is to find one end; for small orders.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from bapipe.schedule.actions import Action, Kind, Schedule
from bapipe.schedule.channel_window import ChannelBounds

__all__ = ["DISCIPLINES", "UNBOUNDED", "Process", "gets_to_its_end", "processes_of", "reachable_ends"]

UNBOUNDED = ChannelBounds(ahead=1_000_000, window=1_000_000)
"""receives are all posted ahead and sends never block"""
SLOTS = 2
"""buffers of an ipc channel"""

Channel = tuple[int, bool, int, int]
"""boundary, onward, from rank, to rank"""
Key = tuple[object, ...]
"""a counter's name"""


@dataclass(frozen=True, slots=True)
class Step:
    """Waits until counters have reached these values, then adds one to others."""

    waits: tuple[tuple[Key, int], ...] = ()
    adds: tuple[Key, ...] = ()


@dataclass(slots=True)
class Process:
    """One rank's lane, or a thread of a transport."""

    name: str
    steps: list[Step] = field(default_factory=list)


def _gloo(channel: Channel, count: int) -> list[Process]:  # noqa: ARG001
    """No thread: what is submitted is posted, and a posted pair is delivered."""
    return []


def _staged(channel: Channel, count: int) -> list[Process]:
    sender, receiver = Process(f"sender {channel}"), Process(f"receiver {channel}")
    for number in range(1, count + 1):
        sender.steps += [
            Step(waits=((("submitted", channel), number),), adds=(("sent", channel),)),
            Step(waits=((("posted", channel), number),), adds=(("delivered", channel),)),
        ]
        receiver.steps.append(
            Step(waits=((("posted", channel), number), (("sent", channel), number)), adds=(("arrived", channel),))
        )
    return [sender, receiver]


def _nccl(channel: Channel, count: int) -> list[Process]:
    sender, receiver = Process(f"sender {channel}"), Process(f"receiver {channel}")
    for number in range(1, count + 1):
        sender.steps += [
            Step(waits=((("submitted", channel), number),), adds=(("announced", channel),)),
            Step(waits=((("posted", channel), number),), adds=(("launched", channel, "sender"),)),
            Step(waits=((("launched", channel, "receiver"), number),), adds=(("delivered", channel),)),
        ]
        receiver.steps += [
            Step(
                waits=((("posted", channel), number), (("announced", channel), number)),
                adds=(("launched", channel, "receiver"),),
            ),
            Step(waits=((("launched", channel, "sender"), number),), adds=(("arrived", channel),)),
        ]
    return [sender, receiver]


def _ipc(channel: Channel, count: int) -> list[Process]:
    filling, freeing = Process(f"filling {channel}"), Process(f"freeing {channel}")
    receiver = Process(f"receiver {channel}")
    for number in range(1, count + 1):
        filling.steps.append(
            Step(
                waits=((("submitted", channel), number), (("freed", channel), number - SLOTS)),
                adds=(("announced", channel),),
            )
        )
        freeing.steps.append(
            Step(waits=((("answered", channel), number),), adds=(("freed", channel), ("delivered", channel)))
        )
        receiver.steps += [
            Step(
                waits=((("posted", channel), number), (("announced", channel), number)),
                adds=(("arrived", channel),),
            ),
            Step(adds=(("answered", channel),)),
        ]
    return [filling, freeing, receiver]


DISCIPLINES: dict[str, Callable[[Channel, int], list[Process]]] = {
    "gloo": _gloo,
    "staged": _staged,
    "nccl": _nccl,
    "ipc": _ipc,
}


class _Model:
    """The processes of one order."""

    def __init__(
        self,
        schedule: Schedule,
        orders: Mapping[Key, Sequence[Action]],
        *,
        training: bool,
        transport: str,
        bounds: ChannelBounds,
        unanswered: Collection[int],
        batches: int,
    ) -> None:
        self._schedule, self._training, self._bounds = schedule, training, bounds
        self._threads, self._unanswered = transport != "gloo", frozenset(unanswered)
        self._sent: dict[Channel, list[int]] = defaultdict(list)
        """micro-batches of one global batch in the order in which they are sent"""
        self._receiver: dict[Channel, Key] = {}
        for lane, order in orders.items():
            for action in order:
                source, target = self._ends(action, -1), self._ends(action, 1)
                if target is not None and target[1]:
                    assert action.microbatch is not None
                    self._sent[target[0]].append(action.microbatch)
                if source is not None and source[1]:
                    self._receiver[source[0]] = lane
        self.processes = [self._lane(lane, order, batches) for lane, order in orders.items()]
        for channel, sent in self._sent.items():
            self.processes += DISCIPLINES[transport](channel, batches * len(sent))

    def _ends(self, action: Action, way: int) -> tuple[Channel, bool] | None:
        """The channel that an action takes from (-1) or sends to (+1), and whether it leads to another rank."""
        if action.kind not in (Kind.F, Kind.B, Kind.I) or action.microbatch is None:
            return None
        onward = action.kind == Kind.F
        other = action.stage + (way if onward else -way)
        boundary = min(action.stage, other)
        if not 0 <= other < self._schedule.num_stages or (not onward and boundary in self._unanswered):
            return None
        here, there = (self._schedule.rank_of(stage, action.microbatch) for stage in (action.stage, other))
        ranks = (here, there) if way > 0 else (there, here)
        return (boundary, onward, *ranks), here != there

    def _lane(self, lane: Key, order: Sequence[Action], batches: int) -> Process:
        process = Process(f"lane {lane}")
        boxes = [channel for channel, receiver in self._receiver.items() if receiver == lane]
        for batch in range(batches):
            taken: Counter[Channel] = Counter()
            unreleased: dict[Channel, list[int]] = defaultdict(list)
            for channel in boxes:
                first = min(self._bounds.ahead, len(self._sent[channel]))
                process.steps += [Step(adds=(("posted", channel),))] * first
            for action in order:
                self._action(process, action, batch, taken, unreleased)
            for channel, numbers in unreleased.items():
                process.steps += [self._delivered(channel, number) for number in numbers]
        return process

    def _action(
        self,
        process: Process,
        action: Action,
        batch: int,
        taken: Counter[Channel],
        unreleased: dict[Channel, list[int]],
    ) -> None:
        steps, microbatch = process.steps, action.microbatch
        source, target = self._ends(action, -1), self._ends(action, 1)
        if source is not None and not source[1]:
            steps.append(Step(waits=((("made", source[0], microbatch), batch + 1),)))
        elif source is not None:
            self._take(steps, source[0], action, batch, taken)
            back = (source[0][0], True, source[0][3], source[0][2])
            if not source[0][1] and self._place(back, action) in unreleased[back]:
                unreleased[back].remove(self._place(back, action))
                steps.append(self._delivered(back, self._number(back, action, batch)))
        if action.kind in (Kind.B, Kind.I, Kind.R):  # on another lane of the rank its forward may come later
            steps.append(Step(waits=((("done", action.stage, Kind.F, microbatch), batch + 1),)))
        steps.append(Step(adds=(("done", action.stage, action.kind, microbatch),)))
        if target is not None and not target[1]:
            steps.append(Step(adds=(("made", target[0], microbatch),)))
        elif target is not None:
            self._send(steps, target[0], action, batch, unreleased)

    def _place(self, channel: Channel, action: Action) -> int:
        assert action.microbatch is not None
        sent = self._sent.get(channel, [])
        return sent.index(action.microbatch) if action.microbatch in sent else -1

    def _number(self, channel: Channel, action: Action, batch: int) -> int:
        """Of a message on its channel, from 1."""
        return batch * len(self._sent[channel]) + self._place(channel, action) + 1

    def _take(
        self, steps: list[Step], channel: Channel, action: Action, batch: int, taken: Counter[Channel]
    ) -> None:
        """Messages come in their order; those before this one are kept."""
        total, arrived = len(self._sent[channel]), "arrived" if self._threads else "submitted"
        if self._place(channel, action) < 0:
            steps.append(Step(waits=((("never",), 1),)))
            return
        while taken[channel] <= self._place(channel, action):
            taken[channel] += 1
            number = batch * total + taken[channel]
            waits = (((arrived, channel), number), (("posted", channel), number))
            more = taken[channel] + self._bounds.ahead <= total
            steps.append(Step(waits=waits))
            if more:
                steps.append(Step(adds=(("posted", channel),)))

    def _send(
        self, steps: list[Step], channel: Channel, action: Action, batch: int, unreleased: dict[Channel, list[int]]
    ) -> None:
        boundary, onward = channel[:2]
        steps.append(Step(adds=(("submitted", channel),)))
        if self._training and onward and boundary not in self._unanswered:
            unreleased[channel].append(self._place(channel, action))
            return
        unreleased[channel].append(self._number(channel, action, batch))
        if len(unreleased[channel]) > self._bounds.window:
            steps.append(self._delivered(channel, unreleased[channel].pop(0)))

    def _delivered(self, channel: Channel, number: int) -> Step:
        return Step(waits=((("delivered" if self._threads else "posted", channel), number),))


def processes_of(
    schedule: Schedule,
    *,
    orders: Mapping[Key, Sequence[Action]] | None = None,
    training: bool = True,
    transport: str = "gloo",
    bounds: ChannelBounds | None = None,
    unanswered: Collection[int] = (),
    batches: int = 1,
) -> list[Process]:
    """Ranks and threads that run an order so many times. `orders` are the lanes' actions, by default all that the
    schedule has, without all-reduces and optimizer steps, which come when all else is done."""
    kinds = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)
    lanes: Mapping[Key, Sequence[Action]] = orders or {
        (index, lane.rank): [action for action in lane if action.kind in kinds]
        for index, lane in enumerate(schedule.lanes)
        if lane.name != "all-reduce"
    }
    model = _Model(
        schedule,
        lanes,
        training=training,
        transport=transport,
        bounds=bounds or ChannelBounds(),
        unanswered=unanswered,
        batches=batches,
    )
    return model.processes


def gets_to_its_end(processes: Sequence[Process]) -> bool:
    """Whether every process takes all its steps: one maximal run, which stands for all."""
    counters: Counter[Key] = Counter()
    places = [0] * len(processes)
    waiting: dict[Key, list[int]] = defaultdict(list)
    ready = list(range(len(processes)))
    while ready:
        index = ready.pop()
        steps = processes[index].steps
        while places[index] < len(steps):
            step = steps[places[index]]
            short = next((key for key, value in step.waits if counters[key] < value), None)
            if short is not None:
                waiting[short].append(index)
                break
            places[index] += 1
            for key in step.adds:
                counters[key] += 1
                ready += waiting.pop(key, [])
    return all(place == len(process.steps) for place, process in zip(places, processes, strict=True))


def reachable_ends(processes: Sequence[Process], *, limit: int = 200_000) -> tuple[set[tuple[int, ...]], int]:
    """The states in which nothing can move, of all interleavings, and how many states there are in all.

    A state is how many steps each process has taken. OverflowError beyond `limit` states.
    """
    before: list[dict[Key, list[int]]] = []
    """of each process and counter: how much its first n steps add"""
    for process in processes:
        own: dict[Key, list[int]] = {}
        for key in {key for step in process.steps for key in step.adds}:
            own[key] = [0, *itertools.accumulate(step.adds.count(key) for step in process.steps)]
        before.append(own)

    def enabled(state: tuple[int, ...], index: int) -> bool:
        steps = processes[index].steps
        if state[index] == len(steps):
            return False
        return all(
            sum(own[key][place] for own, place in zip(before, state, strict=True) if key in own) >= value
            for key, value in steps[state[index]].waits
        )

    start = (0,) * len(processes)
    seen, ahead, ends = {start}, [start], set[tuple[int, ...]]()
    while ahead:
        state = ahead.pop()
        moves = [index for index in range(len(processes)) if enabled(state, index)]
        if not moves:
            ends.add(state)
        for index in moves:
            made = (*state[:index], state[index] + 1, *state[index + 1 :])
            if made not in seen:
                seen.add(made)
                ahead.append(made)
        if len(seen) > limit:
            raise OverflowError(f"more than {limit} states")
    return ends, len(seen)
