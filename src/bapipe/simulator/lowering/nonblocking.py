"""Lowering where sends do not block: what a task makes goes over a link while its rank computes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace

import numpy as np

from bapipe.schedule.actions import Kind, Lane, Schedule
from bapipe.simulator.engine import TaskGraph
from bapipe.simulator.lowering.task_graph import Channel, Ints, Lowered, lane_numbers, sorted_edges, update_waits
from bapipe.simulator.network import Network

__all__ = ["lower_links"]


def lower_links(schedule: Schedule, network: Network, unanswered: Collection[int] = ()) -> Lowered:
    """The task graph over links that do not block; over `unanswered` boundaries no gradient comes back."""
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
    answered = [boundary for boundary in range(schedule.num_stages - 1) if boundary not in unanswered]
    send_to[backward[1:][answered]] = backward[:-1][answered]
    channels, channel_link, channel = _channels(schedule, network, forward, backward, tasks, unanswered)

    waits = [
        _waits(forward.ravel(), backward.ravel(), lane_of),
        _waits(*_cap_pairs(schedule, forward, backward), lane_of),
        update_waits(schedule, kinds, stages, ranks),
    ]
    if (kinds == int(Kind.W)).any():
        waits.append(_waits(positions(Kind.I).ravel(), positions(Kind.W).ravel(), lane_of))
    before, after = (np.concatenate(both) for both in zip(*waits, strict=True))
    edge_start, edge_to = sorted_edges(before, after, tasks)
    senders = np.flatnonzero(channel >= 0)
    uplink_start, uplink = _uplinks(channels, int(channel_link.max(initial=-1)) + 1)
    graph = TaskGraph(
        lane_start=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        lane_of=lane_of,
        send_to=send_to[:-1],
        channel=channel,
        channel_link=channel_link,
        uplink_start=uplink_start,
        uplink=uplink,
        contended=len(uplink) > 0 or _contended(lanes, channels, channel_link, channel, lane_of),
        edge_start=edge_start,
        edge_to=edge_to,
    )
    return Lowered(
        graph=graph,
        kinds=kinds,
        stages=stages,
        microbatches=microbatches,
        ranks=ranks,
        lanes=np.repeat(np.array(lane_numbers(lanes), dtype=np.int64), lengths),
        channels=channels,
        senders=senders,
        receiving_ranks=ranks[send_to[senders]],
        receivers=send_to[senders],
    )


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


def _channels(
    schedule: Schedule,
    network: Network,
    forward: Ints,
    backward: Ints,
    tasks: int,
    unanswered: Collection[int],
) -> tuple[tuple[Channel, ...], Ints, Ints]:
    """The channels, each one's link, and each task's channel, or -1 where it sends nothing to another rank."""
    channels: list[Channel] = []
    links: list[int] = []
    numbers: dict[Hashable, int] = {}
    channel = np.full(tasks + 1, -1, dtype=np.int64)
    for boundary in range(schedule.num_stages - 1):
        # Micro-batches that far apart go between the same two replicas.
        meetings = schedule.meetings(boundary)
        for onward in (True, False):
            if not onward and boundary in unanswered:
                continue
            made = forward[boundary] if onward else backward[boundary + 1]
            known: dict[tuple[int, int], int] = {}
            by_turn = np.full(len(meetings), -1, dtype=np.int64)
            for turn, (before, after) in enumerate(meetings):
                ends = (before, after) if onward else (after, before)
                if before == after:
                    continue
                by_turn[turn] = known.setdefault(ends, len(channels))
                if known[ends] < len(channels):
                    continue
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
                        uplinks=route.uplinks,
                    )
                )
            channel[made] = by_turn[np.arange(len(made)) % len(meetings)]
    crossing = Counter(key for one in channels for key, _ in one.uplinks)
    if crossing:
        # What one channel alone crosses it never waits for.
        channels = [
            replace(one, uplinks=tuple(item for item in one.uplinks if crossing[item[0]] > 1)) for one in channels
        ]
    return tuple(channels), np.array(links, dtype=np.int64), channel[:-1]


def _uplinks(channels: Sequence[Channel], links: int) -> tuple[Ints, Ints]:
    """The first uplink of each channel and the uplinks of all, numbered on from the links."""
    counts = [len(one.uplinks) for one in channels]
    numbers: dict[Hashable, int] = {}
    found = [links + numbers.setdefault(key, len(numbers)) for one in channels for key, _ in one.uplinks]
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), np.array(found, dtype=np.int64)


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
