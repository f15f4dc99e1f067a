"""The links of a cluster as runs have used them: through their own transport, with their messages, beside work.

A link file or a measurement of idle ranks says what a link can do. In a run, ranks compute while messages travel,
and on CPUs the transport's threads wait for a core: a message of 32 kB takes some 80 µs between idle ranks and
several times that between busy ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from bapipe.hardware.cluster import Cluster, Link
from bapipe.records.plan import Plan
from bapipe.records.run_record import RunRecord
from bapipe.schedule.actions import Action, Kind

__all__ = ["Message", "received_messages", "with_measured_links"]

_APART = 1.5
"""how many times as large the largest message must be as the smallest to tell bandwidth from latency"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message whose receiver was waiting for it, so that its arrival is known."""

    sender: int
    receiver: int
    """ranks"""
    nbytes: float
    seconds: float
    """from the sender's handing it over to the receiver's having it in hand"""


def received_messages(plan: Plan, record: RunRecord) -> tuple[Message, ...]:
    """The messages of the recorded step that a rank waited for.

    A rank takes a message in hand when it needs it. One that lay ready before has no arrival time of its own and
    is left out.
    """
    sender = {(event.action): event.rank for event in record.events}
    ends: dict[int, list[float]] = {}
    for event in record.events:
        ends.setdefault(event.rank, []).append(event.end)
    found = []
    for item in record.transfers or ():
        action = Action.parse(item.action)
        stage = plan.stages[action.stage]
        nbytes = stage.send_forward_bytes if action.kind == Kind.F else stage.send_backward_bytes
        free = max((end for end in ends.get(item.to_rank, ()) if end <= item.arrival), default=0.0)
        waited = item.arrival - max(free, item.start)
        if nbytes > 0 and waited > 0.05 * (item.arrival - item.start):
            found.append(
                Message(
                    sender=sender[item.action],
                    receiver=item.to_rank,
                    nbytes=nbytes,
                    seconds=item.arrival - item.start,
                )
            )
    return tuple(found)


def with_measured_links(cluster: Cluster, runs: Sequence[tuple[Plan, RunRecord]]) -> Cluster:
    """The cluster with the links that these runs saw, within nodes and between them; others stay as they were.

    Latency and bandwidth are fitted to the medians of each message size. Where all messages are about as large,
    the bandwidth stays and the latency takes the difference.
    """
    times: dict[bool, dict[float, list[float]]] = {}
    nodes = {item.name: item.node for item in cluster.accelerators}
    for plan, record in runs:
        for message in received_messages(plan, record):
            first, second = (nodes[plan.ranks[rank]] for rank in (message.sender, message.receiver))
            times.setdefault(first == second, {}).setdefault(message.nbytes, []).append(message.seconds)
    within = _fitted(cluster.within, times.get(True, {}))
    between = cluster.between
    if False in times:
        between = _fitted(between or cluster.within, times[False])
    return replace(cluster, within=within, between=between)


def _fitted(link: Link, times: Mapping[float, Sequence[float]]) -> Link:
    """time = latency + bytes / bandwidth through the medians, the larger and the smaller messages' mean."""
    if not times:
        return link
    points = sorted((nbytes, median(seconds)) for nbytes, seconds in times.items())
    (low, first), (high, last) = points[0], points[-1]
    if high >= _APART * low and last > first:
        slope = (last - first) / (high - low)
        latency = first - slope * low
        if latency >= 0:
            return replace(link, bandwidth=1 / slope, latency=latency)
        return replace(link, bandwidth=high / last, latency=0.0)
    typical = median(seconds - nbytes / link.bandwidth for nbytes, seconds in points)
    return replace(link, latency=max(0.0, typical))
