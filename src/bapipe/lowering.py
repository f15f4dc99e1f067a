"""From a Schedule to the task graph that `bapipe.engine` times.

Compute actions become tasks on their lanes. What one stage makes and its neighbour needs becomes an edge over a
link. With blocking sends each exchange becomes tasks of its own, because both ranks stand still meanwhile.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bapipe.engine import TaskGraph
from bapipe.errors import BaPipeError
from bapipe.schedule.actions import Action, Kind, Lane, Schedule

__all__ = ["FORWARD_MESSAGE", "Lowered", "Network", "Route", "lower", "lower_blocking"]

Ints = NDArray[np.int64]
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
        route = self.routes.get((source, target))
        if route is None and self.routes:
            raise BaPipeError(f"there is no link from rank {source} to rank {target}; add it to the cluster")
        return route or Route()

    def link(self, source: int, target: int) -> Hashable:
        link = self.route(source, target).link
        if link is not None:
            return link
        if self.duplex == "shared":
            return "bus"
        return (min(source, target), max(source, target)) if self.duplex == "half" else (source, target)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lowered:
    """A task graph and what each task and edge stands for."""

    graph: TaskGraph
    kinds: Ints
    stages: Ints
    """for a message: the stage before its boundary"""
    microbatches: Ints
    ranks: Ints
    lanes: Ints
    """0 for a rank's first lane, 1 for its second…"""
    edge_source: Ints
    edge_rate: NDArray[np.float64]
    """seconds per unit of what crosses the edge's link"""
    edge_latency: NDArray[np.float64]
    message_rate: NDArray[np.float64] | None = None
    """with blocking sends, seconds per unit of each message task; 0 elsewhere"""
    message_latency: NDArray[np.float64] | None = None
    message_to: Ints | None = None
    """with blocking sends, the rank that receives each message task"""


def _concatenated(lanes: tuple[Lane, ...], name: str) -> Ints:
    return np.concatenate([getattr(lane, name) for lane in lanes]) if lanes else np.zeros(0, np.int64)


def lower(schedule: Schedule, network: Network) -> Lowered:
    """The task graph of a schedule over non-blocking links."""
    lanes = schedule.lanes
    lengths = np.array([len(lane) for lane in lanes], dtype=np.int64)
    lane_start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    lane_of = np.repeat(np.arange(len(lanes), dtype=np.int64), lengths)
    ranks = np.repeat(np.array([lane.rank for lane in lanes], dtype=np.int64), lengths)
    kinds, stages = _concatenated(lanes, "kinds"), _concatenated(lanes, "stages")
    microbatches = _concatenated(lanes, "microbatches")

    shape = (schedule.num_stages, schedule.num_microbatches)
    where = {}
    for kind in (Kind.F, Kind.B, Kind.I, Kind.W):
        where[kind] = np.full(shape, -1, dtype=np.int64)
        tasks = np.flatnonzero(kinds == kind)
        where[kind][stages[tasks], microbatches[tasks]] = tasks
    forward, backward = where[Kind.F], np.maximum(where[Kind.B], where[Kind.I])

    def pairs(source: Ints, target: Ints) -> tuple[Ints, Ints]:
        both = (source >= 0) & (target >= 0)
        return source[both], target[both]

    onward = pairs(forward[:-1], forward[1:])
    back = pairs(backward[1:], backward[:-1])
    source, target = (np.concatenate(both) for both in zip(onward, back, strict=True))

    local = [pairs(forward, backward), pairs(where[Kind.I], where[Kind.W]), _cap_edges(schedule, where)]
    local.extend(_update_edges(schedule, kinds, stages, ranks))
    more_source, more_target = (np.concatenate(both) for both in zip(*local, strict=True))
    needed = (lane_of[more_source] != lane_of[more_target]) | (more_source > more_target)
    more_source, more_target = more_source[needed], more_target[needed]

    # The one transfer of a task comes first among its edges, so only the few others need sorting.
    counts = np.bincount(source, minlength=len(kinds)) + np.bincount(more_source, minlength=len(kinds))
    edge_start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    order = np.argsort(more_source, kind="stable")
    more_source, more_target = more_source[order], more_target[order]
    slot = edge_start[source]
    free = np.ones(edge_start[-1], dtype=bool)
    free[slot] = False
    edge_to, edge_source = np.empty(edge_start[-1], np.int64), np.empty(edge_start[-1], np.int64)
    edge_to[slot], edge_source[slot] = target, source
    edge_to[free], edge_source[free] = more_target, more_source

    links, rates, latencies = _links(schedule, network, ranks[source], ranks[target])
    edge_link = np.full(len(edge_to), -1, np.int64)
    edge_rate, edge_latency = np.zeros(len(edge_to)), np.zeros(len(edge_to))
    edge_link[slot], edge_rate[slot], edge_latency[slot] = links, rates, latencies
    num_links = int(links.max()) + 1 if len(links) else 0
    sender = np.zeros(num_links + 1, np.int64)
    sender[links] = lane_of[source]
    graph = TaskGraph(
        lane_start=lane_start,
        lane_of=lane_of,
        edge_start=edge_start,
        edge_to=edge_to,
        edge_link=edge_link,
        num_links=num_links,
        contended=bool((sender[links] != lane_of[source])[links >= 0].any()),
    )
    return Lowered(
        graph=graph,
        kinds=kinds,
        stages=stages,
        microbatches=microbatches,
        ranks=ranks,
        lanes=np.repeat(np.array(_lane_numbers(lanes), dtype=np.int64), lengths),
        edge_source=edge_source,
        edge_rate=edge_rate,
        edge_latency=edge_latency,
    )


def _lane_numbers(lanes: tuple[Lane, ...]) -> list[int]:
    seen: dict[int, int] = {}
    numbers = []
    for lane in lanes:
        numbers.append(seen.get(lane.rank, 0))
        seen[lane.rank] = numbers[-1] + 1
    return numbers


def _cap_edges(schedule: Schedule, where: dict[Kind, Ints]) -> tuple[Ints, Ints]:
    """Where F and B run on different lanes, B(m−K) must end before F(m) may start."""
    none = (np.zeros(0, np.int64), np.zeros(0, np.int64))
    if schedule.caps is None or schedule.concurrency == "none":
        return none
    sources, targets = [], []
    for stage, cap in enumerate(schedule.caps):
        sources.append(where[Kind.B][stage, : max(0, schedule.num_microbatches - cap)])
        targets.append(where[Kind.F][stage, cap:])
    return np.concatenate(sources), np.concatenate(targets)


def _update_edges(schedule: Schedule, kinds: Ints, stages: Ints, ranks: Ints) -> list[tuple[Ints, Ints]]:
    """Every replica's last gradient -> every replica's all-reduce -> that replica's update."""
    reduces = np.flatnonzero(kinds == Kind.A)
    updates = np.flatnonzero(kinds == Kind.U)
    gradients = np.flatnonzero(np.isin(kinds, (Kind.B, Kind.W)))
    last = {(int(stages[task]), int(ranks[task])): int(task) for task in gradients}
    sources, targets = [], []
    for task in reduces:
        for rank in schedule.placement[int(stages[task])]:
            if (int(stages[task]), rank) in last:
                sources.append(last[int(stages[task]), rank])
                targets.append(int(task))
    reduced = {(int(stages[task]), int(ranks[task])): int(task) for task in reduces}
    for task in updates:
        before = reduced.get((int(stages[task]), int(ranks[task])))
        if before is not None:
            sources.append(before)
            targets.append(int(task))
    return [(np.array(sources, dtype=np.int64), np.array(targets, dtype=np.int64))]


def _links(
    schedule: Schedule, network: Network, source: Ints, target: Ints
) -> tuple[Ints, NDArray[np.float64], NDArray[np.float64]]:
    """Link, rate and latency of each transfer; between stages of the same rank there is no link."""
    size = schedule.num_ranks
    codes = source * size + target
    used = np.zeros(size * size, dtype=bool)
    used[codes] = True
    links = np.full(size * size, -1, np.int64)
    rates, latencies = np.zeros(size * size), np.zeros(size * size)
    numbers: dict[Hashable, int] = {}
    for code in np.flatnonzero(used):
        ends = divmod(int(code), size)
        if ends[0] != ends[1]:
            route = network.route(*ends)
            links[code] = numbers.setdefault(network.link(*ends), len(numbers))
            rates[code], latencies[code] = route.seconds_per_unit, route.latency
    return links[codes], rates[codes], latencies[codes]


def lower_blocking(schedule: Schedule, network: Network) -> Lowered:
    """The task graph with blocking, rendezvous exchanges.

    A send and the receive that follows it from the same neighbour are one exchange (Megatron's
    send_forward_recv_backward and send_backward_recv_forward); everything else is one after the other.
    """
    builder = _BlockingBuilder(schedule, network)
    return builder.build()


@dataclass(slots=True)
class _BlockingBuilder:
    schedule: Schedule
    network: Network
    rows: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    """kind, stage, micro-batch, rank, lane and, for a message, receiving rank of each task"""
    starts: list[int] = field(default_factory=lambda: [0])
    ends_of: dict[tuple[int, int, int], list[int]] = field(default_factory=dict)
    """message -> the exchange tasks at its two ends"""

    def build(self) -> Lowered:
        numbers = _lane_numbers(self.schedule.lanes)
        for lane, number in zip(self.schedule.lanes, numbers, strict=True):
            self._add_lane(lane, number)
        sources, targets = [], []
        firsts = set(self.starts)
        for (kind, stage, microbatch), ends in self.ends_of.items():
            task = len(self.rows)
            before = self.schedule.rank_of(stage, microbatch)
            after = self.schedule.rank_of(stage + 1, microbatch)
            sender, receiver = (before, after) if kind == FORWARD_MESSAGE else (after, before)
            self.rows.append((kind, stage, microbatch, sender, 0, receiver))
            self.starts.append(len(self.rows))
            for end in ends:
                if end not in firsts:
                    sources.append(end - 1)
                    targets.append(task)
                sources.append(task)
                targets.append(end)
        table = np.array(self.rows, dtype=np.int64).reshape(-1, 6)
        kinds, stages, ranks = table[:, 0], table[:, 1], table[:, 3]
        more = _update_edges(self.schedule, kinds, stages, ranks)
        edge_source = np.concatenate([np.array(sources, dtype=np.int64), more[0][0]])
        edge_to = np.concatenate([np.array(targets, dtype=np.int64), more[0][1]])
        order = np.argsort(edge_source, kind="stable")
        edge_source, edge_to = edge_source[order], edge_to[order]
        counts = np.bincount(edge_source, minlength=len(table))
        routes = [self.network.route(row[3], row[5]) if row[5] >= 0 else None for row in self.rows]
        lane_start = np.array(self.starts, dtype=np.int64)
        graph = TaskGraph(
            lane_start=lane_start,
            lane_of=np.repeat(np.arange(len(lane_start) - 1, dtype=np.int64), np.diff(lane_start)),
            edge_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            edge_to=edge_to,
            edge_link=np.full(len(edge_to), -1, np.int64),
            num_links=0,
            contended=False,
        )
        return Lowered(
            graph=graph,
            kinds=kinds,
            stages=stages,
            microbatches=table[:, 2],
            ranks=ranks,
            lanes=table[:, 4],
            edge_source=edge_source,
            edge_rate=np.zeros(len(edge_to)),
            edge_latency=np.zeros(len(edge_to)),
            message_rate=np.array([route.seconds_per_unit if route else 0.0 for route in routes]),
            message_latency=np.array([route.latency if route else 0.0 for route in routes]),
            message_to=table[:, 5],
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
            self.rows.append((int(action.kind), action.stage, microbatch, lane.rank, number, -1))
            sent = self._sent(lane.rank, action)
            if sent is None:
                continue
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
        self.rows.append((EXCHANGE, -1, -1, rank, lane, -1))

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
