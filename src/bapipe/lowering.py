"""From a Schedule to the task graph that `bapipe.engine` times.

Compute actions become tasks on their lanes. What one stage makes and its neighbour needs is sent from task to task
over a link. With blocking sends each exchange becomes tasks of its own, because both ranks stand still meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bapipe.engine import TaskGraph
from bapipe.errors import BaPipeError
from bapipe.schedule.actions import Action, Kind, Lane, Schedule

__all__ = [
    "BACKWARD_MESSAGE",
    "EXCHANGE",
    "FORWARD_MESSAGE",
    "Channel",
    "Lowered",
    "Network",
    "Route",
    "lower",
]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
FORWARD_MESSAGE, BACKWARD_MESSAGE, EXCHANGE = 7, 8, 9
"""task kinds beyond `Kind`: a blocking transfer each way, and a rank standing still for it"""
_TALKS = (Kind.F, Kind.B, Kind.I)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How data goes from one rank to another."""

    seconds_per_unit: float = 1.0
    """1 where amounts are already seconds; 1/bandwidth where they are bytes"""
    latency: float = 0.0
    link: Hashable = None
    """routes of the same link share it; None: a link of its own per direction"""


_PLAIN = Route()


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The links between ranks, as the simulator sees them."""

    sending: Literal["after-compute", "cut-through", "blocking"] | None = None
    """None: as the schedule says. blocking: both ranks stand still during an exchange, as in Megatron"""
    duplex: Literal["full", "half", "shared"] = "full"
    """half: both directions of a pair share its link; shared: all pairs share one bus"""
    latency_only: bool = False
    """a transfer takes its time but never queues behind another"""
    routes: Mapping[tuple[int, int], Route] = field(default_factory=dict)
    """what differs from a plain link, by (from rank, to rank)"""

    def route(self, source: int, target: int) -> Route:
        if not self.routes:
            return _PLAIN
        route = self.routes.get((source, target))
        if route is None:
            raise BaPipeError(f"there is no link from rank {source} to rank {target}; add it to the cluster")
        return route

    def link(self, source: int, target: int) -> Hashable:
        link = self.route(source, target).link
        if link is not None:
            return link
        if self.duplex == "shared":
            return "bus"
        return (min(source, target), max(source, target)) if self.duplex == "half" else (source, target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """One direction over one boundary, from one replica to one."""

    boundary: int
    """the stage before it"""
    onward: bool
    """True for activations, False for errors"""
    from_rank: int
    to_rank: int
    rate: float
    """seconds per unit of what crosses"""
    latency: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lowered:
    """A task graph and what each task stands for."""

    graph: TaskGraph
    kinds: Ints
    stages: Ints
    """for a message: the stage before its boundary"""
    microbatches: Ints
    ranks: Ints
    lanes: Ints
    """0 for a rank's first lane, 1 for its second…"""
    channels: tuple[Channel, ...]
    """what the tasks send over; with blocking sends, one per message task"""
    senders: Ints
    """the actions whose output goes to another rank, each by its number among the actions"""
    receiving_ranks: Ints
    """for each of them that rank"""
    first_message: int | None = None
    """with blocking sends, the first of the message tasks, which come last"""


def lower(schedule: Schedule, network: Network) -> Lowered:
    """The task graph of a schedule on a network. Linear in its actions.

    The schedule remembers the last one, because a schedule is often timed under many costs.
    """
    known: tuple[Network, Lowered] | None = vars(schedule).get("_lowered")
    if known is not None and known[0] == network:
        return known[1]
    lowered = (_lower_blocking if network.sending == "blocking" else _lower)(schedule, network)
    vars(schedule)["_lowered"] = (network, lowered)
    return lowered


def _lower(schedule: Schedule, network: Network) -> Lowered:
    """The task graph over links that do not block."""
    lanes = schedule.lanes
    lengths = np.array([len(lane) for lane in lanes], dtype=np.int64)
    kinds, stages, microbatches = (
        np.concatenate([np.zeros(0, np.int64), *(getattr(lane, name) for lane in lanes)])
        for name in ("kinds", "stages", "microbatches")
    )
    ranks = np.repeat(np.array([lane.rank for lane in lanes], dtype=np.int64), lengths)
    lane_of = np.repeat(np.arange(len(lanes), dtype=np.int64), lengths)
    tasks = len(kinds)

    def positions(*wanted: Kind) -> Ints:
        """The task of these kinds for each (stage, micro-batch), or -1."""
        table = np.full((schedule.num_stages, schedule.num_microbatches), -1, dtype=np.int64)
        for kind in wanted:
            own = np.flatnonzero(kinds == int(kind))
            table[stages[own], microbatches[own]] = own
        return table

    forward, backward = positions(Kind.F), positions(Kind.B, Kind.I)
    # The -1 of a task that is not there falls on the extra entry after the last task.
    send_to = np.full(tasks + 1, -1, dtype=np.int64)
    send_to[forward[:-1]] = forward[1:]
    send_to[backward[1:]] = backward[:-1]
    channels, channel_link, channel = _channels(schedule, network, forward, backward, tasks)

    waits = [
        _waits(forward.ravel(), backward.ravel(), lane_of),
        _waits(*_cap_pairs(schedule, forward, backward), lane_of),
        _update_waits(schedule, kinds, stages, ranks),
    ]
    if (kinds == int(Kind.W)).any():
        waits.append(_waits(positions(Kind.I).ravel(), positions(Kind.W).ravel(), lane_of))
    before, after = (np.concatenate(both) for both in zip(*waits, strict=True))
    edge_start, edge_to = _sorted_edges(before, after, tasks)
    senders = np.flatnonzero(channel >= 0)
    graph = TaskGraph(
        lane_start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        lane_of=lane_of,
        send_to=send_to[:-1],
        channel=channel,
        channel_link=channel_link,
        contended=_contended(lanes, channels, channel_link, channel, lane_of),
        edge_start=edge_start,
        edge_to=edge_to,
    )
    return Lowered(
        graph=graph,
        kinds=kinds,
        stages=stages,
        microbatches=microbatches,
        ranks=ranks,
        lanes=np.repeat(np.array(_lane_numbers(lanes), dtype=np.int64), lengths),
        channels=channels,
        senders=senders,
        receiving_ranks=ranks[send_to[senders]],
    )


def _lane_numbers(lanes: tuple[Lane, ...]) -> list[int]:
    seen: dict[int, int] = {}
    numbers = []
    for lane in lanes:
        numbers.append(seen.get(lane.rank, 0))
        seen[lane.rank] = numbers[-1] + 1
    return numbers


def _waits(before: Ints, after: Ints, lane_of: Ints) -> tuple[Ints, Ints]:
    """Of the pairs of tasks, both there, those that the order of their lane does not already keep."""
    needed = (lane_of[before] != lane_of[after]) | (before > after)
    needed &= (before >= 0) & (after >= 0)
    return before[needed], after[needed]


def _cap_pairs(schedule: Schedule, forward: Ints, backward: Ints) -> tuple[Ints, Ints]:
    """Where F and B run on different lanes, B(m−K) must end before F(m) may start."""
    ended, started = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    if schedule.caps is not None and schedule.concurrency != "none":
        for stage, cap in enumerate(schedule.caps):
            ended.append(backward[stage, : max(0, schedule.num_microbatches - cap)])
            started.append(forward[stage, cap:])
    return np.concatenate(ended), np.concatenate(started)


def _update_waits(schedule: Schedule, kinds: Ints, stages: Ints, ranks: Ints) -> tuple[Ints, Ints]:
    """Every replica's last gradient -> every replica's all-reduce -> that replica's update."""
    sources, targets = [], []
    reduces = np.flatnonzero(kinds == int(Kind.A)).tolist()
    if reduces:
        gradients = np.flatnonzero((kinds == Kind.B) | (kinds == Kind.W))
        places = zip(stages[gradients].tolist(), ranks[gradients].tolist(), strict=True)
        last = dict(zip(places, gradients.tolist(), strict=True))
        for task in reduces:
            for rank in schedule.placement[int(stages[task])]:
                if (int(stages[task]), rank) in last:
                    sources.append(last[int(stages[task]), rank])
                    targets.append(task)
        reduced = {(int(stages[task]), int(ranks[task])): task for task in reduces}
        for task in np.flatnonzero(kinds == Kind.U).tolist():
            before = reduced.get((int(stages[task]), int(ranks[task])))
            if before is not None:
                sources.append(before)
                targets.append(task)
    return np.array(sources, dtype=np.int64), np.array(targets, dtype=np.int64)


def _sorted_edges(source: Ints, target: Ints, tasks: int) -> tuple[Ints, Ints]:
    """Edges as (first edge of each task, target of each edge)."""
    starts = np.zeros(tasks + 1, np.int64)
    if not len(source):
        return starts, target
    np.cumsum(np.bincount(source, minlength=tasks), out=starts[1:])
    return starts, target[np.argsort(source, kind="stable")]


def _channels(
    schedule: Schedule, network: Network, forward: Ints, backward: Ints, tasks: int
) -> tuple[tuple[Channel, ...], Ints, Ints]:
    """The channels, each one's link, and each task's channel, or -1 where it sends nothing to another rank."""
    channels: list[Channel] = []
    links: list[int] = []
    numbers: dict[Hashable, int] = {}
    channel = np.full(tasks + 1, -1, dtype=np.int64)
    for boundary in range(schedule.num_stages - 1):
        before, after = schedule.placement[boundary : boundary + 2]
        # Micro-batches that far apart go between the same two replicas.
        turns = math.lcm(len(before), len(after))
        for onward, senders, receivers in ((True, before, after), (False, after, before)):
            made = forward[boundary] if onward else backward[boundary + 1]
            for turn in range(min(turns, schedule.num_microbatches)):
                ends = senders[turn % len(senders)], receivers[turn % len(receivers)]
                if ends[0] == ends[1]:
                    continue
                channel[made[turn::turns]] = len(channels)
                route = network.route(*ends)
                links.append(numbers.setdefault(network.link(*ends), len(numbers)))
                channels.append(
                    Channel(
                        boundary=boundary,
                        onward=onward,
                        from_rank=ends[0],
                        to_rank=ends[1],
                        rate=route.seconds_per_unit,
                        latency=route.latency,
                    )
                )
    return tuple(channels), np.array(links, dtype=np.int64), channel[:-1]


def _contended(
    lanes: Sequence[Lane], channels: Sequence[Channel], channel_link: Ints, channel: Ints, lane_of: Ints
) -> bool:
    """Whether two lanes send over one link."""
    sender = np.array([one.from_rank for one in channels], dtype=np.int64)
    if len({lane.rank for lane in lanes}) < len(lanes):
        # Ranks with several lanes: ask the tasks. What uses no channel falls on the extra last entry.
        found = np.full(len(channels) + 1, -1, np.int64)
        found[channel] = lane_of
        if ((found[channel] != lane_of) & (channel >= 0)).any():
            return True
        sender = found[:-1]
    sender_of_link = np.full(len(channels), -1, np.int64)
    sender_of_link[channel_link] = sender
    return bool((sender_of_link[channel_link] != sender).any())


def _lower_blocking(schedule: Schedule, network: Network) -> Lowered:
    """The task graph with blocking, rendezvous exchanges.

    A send and the receive that follows it from the same neighbour are one exchange (Megatron's
    send_forward_recv_backward and send_backward_recv_forward); everything else is one after the other.
    """
    return _BlockingBuilder(schedule, network).build()


@dataclass(slots=True)
class _BlockingBuilder:
    schedule: Schedule
    network: Network
    rows: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    """kind, stage, micro-batch, rank and lane of each task"""
    starts: list[int] = field(default_factory=lambda: [0])
    ends_of: dict[tuple[int, int, int], list[int]] = field(default_factory=dict)
    """message -> the exchange tasks at its two ends"""
    sender_of: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """message -> the number of the action that makes it"""
    actions: int = 0

    def build(self) -> Lowered:
        numbers = _lane_numbers(self.schedule.lanes)
        for lane, number in zip(self.schedule.lanes, numbers, strict=True):
            self._add_lane(lane, number)
        sources, targets, channels = [], [], []
        firsts, first_message = set(self.starts), len(self.rows)
        for message in self.sender_of:
            kind, stage, microbatch = message
            task = len(self.rows)
            before = self.schedule.rank_of(stage, microbatch)
            after = self.schedule.rank_of(stage + 1, microbatch)
            sender, receiver = (before, after) if kind == FORWARD_MESSAGE else (after, before)
            route = self.network.route(sender, receiver)
            channels.append(
                Channel(
                    boundary=stage,
                    onward=kind == FORWARD_MESSAGE,
                    from_rank=sender,
                    to_rank=receiver,
                    rate=route.seconds_per_unit,
                    latency=route.latency,
                )
            )
            self.rows.append((kind, stage, microbatch, sender, 0))
            self.starts.append(len(self.rows))
            for end in self.ends_of[message]:
                if end not in firsts:
                    sources.append(end - 1)
                    targets.append(task)
                sources.append(task)
                targets.append(end)
        table = np.array(self.rows, dtype=np.int64).reshape(-1, 5)
        kinds, stages, ranks = table[:, 0], table[:, 1], table[:, 3]
        more_sources, more_targets = _update_waits(self.schedule, kinds, stages, ranks)
        edge_start, edge_to = _sorted_edges(
            np.concatenate([np.array(sources, dtype=np.int64), more_sources]),
            np.concatenate([np.array(targets, dtype=np.int64), more_targets]),
            len(table),
        )
        lane_start = np.array(self.starts, dtype=np.int64)
        graph = TaskGraph(
            lane_start=lane_start,
            lane_of=np.repeat(np.arange(len(lane_start) - 1, dtype=np.int64), np.diff(lane_start)),
            send_to=np.full(len(table), -1, np.int64),
            channel=np.full(len(table), -1, np.int64),
            channel_link=np.zeros(0, np.int64),
            contended=False,
            edge_start=edge_start,
            edge_to=edge_to,
        )
        return Lowered(
            graph=graph,
            kinds=kinds,
            stages=stages,
            microbatches=table[:, 2],
            ranks=ranks,
            lanes=table[:, 4],
            channels=tuple(channels),
            senders=np.array(list(self.sender_of.values()), dtype=np.int64),
            receiving_ranks=np.array([channel.to_rank for channel in channels], dtype=np.int64),
            first_message=first_message,
        )

    def _add_lane(self, lane: Lane, number: int) -> None:
        actions = list(lane)
        received = [self._received(lane.rank, action) for action in actions]
        fused = set()
        for position, action in enumerate(actions):
            arriving = received[position]
            if arriving and position not in fused:
                self._exchange(lane.rank, number, [arriving[1]])
            microbatch = -1 if action.microbatch is None else action.microbatch
            self.rows.append((int(action.kind), action.stage, microbatch, lane.rank, number))
            self.actions += 1
            sent = self._sent(lane.rank, action)
            if sent is None:
                continue
            self.sender_of[sent[1]] = self.actions - 1
            messages = [sent[1]]
            # W, R and U neither send nor receive, so the exchange reaches over them to the next receive.
            after = next((p for p in range(position + 1, len(actions)) if actions[p].kind in _TALKS), None)
            coming = None if after is None else received[after]
            if after is not None and coming and coming[0] == sent[0]:
                messages.append(coming[1])
                fused.add(after)
            self._exchange(lane.rank, number, messages)
        self.starts.append(len(self.rows))

    def _exchange(self, rank: int, lane: int, messages: list[tuple[int, int, int]]) -> None:
        for message in messages:
            self.ends_of.setdefault(message, []).append(len(self.rows))
        self.rows.append((EXCHANGE, -1, -1, rank, lane))

    def _sent(self, rank: int, action: Action) -> tuple[int, tuple[int, int, int]] | None:
        stage, microbatch = action.stage, action.microbatch
        if microbatch is None:
            return None
        if action.kind == Kind.F and stage + 1 < self.schedule.num_stages:
            peer = self.schedule.rank_of(stage + 1, microbatch)
            message = (FORWARD_MESSAGE, stage, microbatch)
        elif action.kind in (Kind.B, Kind.I) and stage > 0:
            peer = self.schedule.rank_of(stage - 1, microbatch)
            message = (BACKWARD_MESSAGE, stage - 1, microbatch)
        else:
            return None
        return None if peer == rank else (peer, message)

    def _received(self, rank: int, action: Action) -> tuple[int, tuple[int, int, int]] | None:
        stage, microbatch = action.stage, action.microbatch
        if microbatch is None:
            return None
        if action.kind == Kind.F and stage > 0:
            peer = self.schedule.rank_of(stage - 1, microbatch)
            message = (FORWARD_MESSAGE, stage - 1, microbatch)
        elif action.kind in (Kind.B, Kind.I) and stage + 1 < self.schedule.num_stages:
            peer = self.schedule.rank_of(stage + 1, microbatch)
            message = (BACKWARD_MESSAGE, stage, microbatch)
        else:
            return None
        return None if peer == rank else (peer, message)
