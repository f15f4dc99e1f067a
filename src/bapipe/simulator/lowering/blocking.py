"""Lowering where sends block: both ranks stand still during an exchange, which is a task of its own on each."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from bapipe.schedule.actions import Action, Kind, Lane, Schedule
from bapipe.simulator.engine import TaskGraph
from bapipe.simulator.lowering.task_graph import (
    BACKWARD_MESSAGE,
    EXCHANGE,
    FORWARD_MESSAGE,
    Channel,
    Lowered,
    lane_numbers,
    sorted_edges,
    update_waits,
)
from bapipe.simulator.network import Network

__all__ = ["lower_blocking"]

_TALKS = (Kind.F, Kind.B, Kind.I)


def lower_blocking(schedule: Schedule, network: Network, unanswered: Collection[int] = ()) -> Lowered:
    """The task graph with blocking, rendezvous exchanges; over `unanswered` boundaries no gradient comes back.

    A send and the receive that follows it from the same neighbour are one exchange (Megatron's
    send_forward_recv_backward and send_backward_recv_forward); everything else is one after the other.
    """
    return _BlockingBuilder(schedule, network, unanswered).build()


@dataclass(slots=True)
class _BlockingBuilder:
    schedule: Schedule
    network: Network
    unanswered: Collection[int]
    rows: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    """kind, stage, micro-batch, rank and lane of each task"""
    starts: list[int] = field(default_factory=lambda: [0])
    ends_of: dict[tuple[int, int, int], list[int]] = field(default_factory=dict)
    """message -> the exchange tasks at its two ends"""
    sender_of: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """message -> the number of the action that makes it"""
    actions: int = 0

    def build(self) -> Lowered:
        numbers = lane_numbers(self.schedule.lanes)
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
        more_sources, more_targets = update_waits(self.schedule, kinds, stages, ranks)
        edge_start, edge_to = sorted_edges(
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
            uplink_start=np.zeros(1, np.int64),
            uplink=np.zeros(0, np.int64),
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

    def _answered(self, boundary: int) -> bool:
        """Whether a gradient comes back from the stage after."""
        return boundary + 1 < self.schedule.num_stages and boundary not in self.unanswered

    def _sent(self, rank: int, action: Action) -> tuple[int, tuple[int, int, int]] | None:
        stage, microbatch = action.stage, action.microbatch
        if microbatch is None:
            return None
        if action.kind == Kind.F and stage + 1 < self.schedule.num_stages:
            peer = self.schedule.rank_of(stage + 1, microbatch)
            message = (FORWARD_MESSAGE, stage, microbatch)
        elif action.kind in (Kind.B, Kind.I) and stage > 0 and stage - 1 not in self.unanswered:
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
        elif action.kind in (Kind.B, Kind.I) and self._answered(stage):
            peer = self.schedule.rank_of(stage + 1, microbatch)
            message = (BACKWARD_MESSAGE, stage, microbatch)
        else:
            return None
        return None if peer == rank else (peer, message)
