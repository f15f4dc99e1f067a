"""What the transfers of a run say of the cluster's links.

A transfer shows how long its link takes only where the receiver stood waiting for it when the sender handed it
over: a busy receiver takes note of it late. A rank that has not acted yet may still be on its way into the step,
so its first input shows nothing either.

Over a link that is always busy the next message is handed over before the receiver is done with the last. Where
that leaves too few, those count for which the receiver waited at least half of the time that the link took.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import Cluster, Link
from bapipe.io.decode import LARGEST_NUMBER
from bapipe.records.plan import Plan
from bapipe.schedule.actions import Kind
from bapipe.simulator.timeline import Timeline

__all__ = ["FEWEST_TRANSFERS", "LinkEstimate", "correct_links", "estimate_links", "fit_links"]

FEWEST_TRANSFERS = 3
"""of fewer, one odd transfer would be the median: nothing is corrected by them"""

_Row = tuple[float, float, float]
"""bytes, seconds predicted and seconds measured of a transfer"""
_MOST_ERROR = 0.9
"""relative error of a link, at most"""
_APART = 1.5
"""how many times as large the larger messages must be as the smaller to tell bandwidth from latency"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEstimate:
    """One entry of the cluster's links, and what the transfers over it that were waited for took."""

    link: str
    """`within` nodes, `between` nodes, a level's name, or the pair, as `a/0 - a/1`"""
    transfers: int
    """that were waited for"""
    bytes: float
    """of such a transfer, median"""
    predicted: float
    """seconds of such a transfer by the plan's cluster, median"""
    measured: float
    """seconds from handing over to arrival, median"""
    ratio: float
    """measured / predicted, median over the transfers"""
    corrected: Link | None
    """with bandwidth / ratio and latency · ratio, so that it takes as long as was measured, and half of the
    quartiles' distance as its spread; None: not known, because there are too few transfers, or because they share
    a bus or an uplink"""


def estimate_links(plan: Plan, *measured: Timeline) -> tuple[LinkEstimate, ...]:
    """An estimate for each of the cluster's links over which something was waited for, in any of these steps.

    Messages of one size cannot tell latency from bandwidth, so both are scaled by one ratio: right for messages
    near those of the run. Empty where a transfer starts with the compute that makes it (cut-through).
    """
    if plan.schedule.sending != "after-compute":
        return ()
    cluster = plan.cluster
    names = [accelerator.name for accelerator in cluster.accelerators]
    index = [names.index(name) for name in plan.ranks]
    found: dict[str, list[_Row]] = {}
    queued: dict[str, list[_Row]] = {}
    links: dict[str, Link | None] = {}
    for step in measured:
        for source, to_rank, since, seconds in _waited_for(step):
            ends = index[int(step.ranks[source])], index[to_rank]
            stage = plan.stages[int(step.stages[source])]
            forward = step.kinds[source] == Kind.F
            size = stage.send_forward_bytes if forward else stage.send_backward_bytes
            key, link, bandwidth, alone = _entry(cluster, *ends)
            predicted = size / bandwidth + (0.0 if since == "message" else link.latency)
            if predicted > 0 and seconds > 0:
                (found if since == "idle" else queued).setdefault(key, []).append((size, predicted, seconds))
                links[key] = link if alone else None
    for key, rows in queued.items():
        if len(found.get(key, ())) < FEWEST_TRANSFERS <= len(rows):
            found[key] = rows
    return tuple(_estimate(key, np.array(rows), links[key]) for key, rows in found.items())


def _waited_for(timeline: Timeline) -> Iterator[tuple[int, int, Literal["idle", "busy", "message"], float]]:
    """Action and receiving rank of transfers whose receiver had ended an action and waited; since when, seconds.

    Since it was handed over, to a receiver that was idle then or still busy; or since the arrival of the message
    before it over the same link, which is then not late by the link's latency once more.
    """
    transfers, consumers, free = timeline.transfers, timeline.consumers(), timeline.previous_end()
    before: dict[tuple[int, int], float] = {}
    for place in np.argsort(transfers.arrival, kind="stable").tolist():
        source, to_rank, consumer = int(transfers.source[place]), int(transfers.to_rank[place]), consumers[place]
        start, arrival = float(transfers.start[place]), float(transfers.arrival[place])
        way = int(timeline.ranks[source]), to_rank
        last = before.get(way, 0.0)
        before[way] = arrival
        if consumer < 0 or free[consumer] <= 0:
            continue
        if free[consumer] <= start:
            yield source, to_rank, "idle", arrival - start
        elif arrival - free[consumer] >= (arrival - max(start, last)) / 2:
            yield source, to_rank, "message" if last > start else "busy", arrival - max(start, last)


def _entry(cluster: Cluster, first: int, second: int) -> tuple[str, Link, float, bool]:
    """Which of the cluster's links joins two accelerators, its bytes/s, and whether nothing but it sets them."""
    link = cluster.link(first, second)
    one, other = (cluster.accelerators[end] for end in (first, second))
    bandwidth = link.bandwidth
    if one.node == other.node and cluster.bus_bandwidth is not None:
        bandwidth = min(bandwidth, cluster.bus_bandwidth)
    alone = bandwidth == link.bandwidth and not any(cluster.uplinks(first, second))
    return cluster.link_name(first, second), link, bandwidth, alone


def _estimate(key: str, rows: np.ndarray, link: Link | None) -> LinkEstimate:
    size, predicted, measured = (float(value) for value in np.median(rows, axis=0))
    ratio = float(np.median(rows[:, 2] / rows[:, 1]))
    corrected = None
    if link is not None and len(rows) >= FEWEST_TRANSFERS:
        low, high = np.percentile(rows[:, 2] / rows[:, 1], (25, 75))
        error = min(_MOST_ERROR, float(high - low) / (2 * ratio))
        bandwidth = min(link.bandwidth / ratio, LARGEST_NUMBER)
        corrected = replace(
            link, bandwidth=bandwidth, latency=link.latency * ratio, spread=max(error, link.spread)
        )
    return LinkEstimate(
        link=key,
        transfers=len(rows),
        bytes=size,
        predicted=predicted,
        measured=measured,
        ratio=ratio,
        corrected=corrected,
    )


def correct_links(cluster: Cluster, estimates: Sequence[LinkEstimate]) -> Cluster:
    """The cluster with the corrected links; those that the run did not use stay as they were."""
    links = {estimate.link: estimate.corrected for estimate in estimates if estimate.corrected is not None}
    if not links:
        seen = max((estimate.transfers for estimate in estimates), default=0)
        raise BaPipeError(
            f"a link's correction needs {FEWEST_TRANSFERS} transfers over it that were waited for (and no bus or "
            f"uplink), the run has {seen}; run more micro-batches, or measure links with bapipe profile --links"
        )
    return replace(
        cluster,
        within=links.get("within", cluster.within),
        between=links.get("between", cluster.between),
        pairs={key: links.get(key, link) for key, link in cluster.pairs.items()},
        levels=tuple(replace(level, link=links.get(level.name, level.link)) for level in cluster.levels),
    )


def fit_links(cluster: Cluster, estimates: Sequence[LinkEstimate]) -> Cluster:
    """The cluster with the links that runs of several message sizes saw; what is not known stays as it was.

    Through the smallest and the largest messages goes time = latency + bytes / bandwidth. Where all are about as
    large, both are scaled by the ratio of the largest.
    """
    by_link: dict[str, list[LinkEstimate]] = {}
    for estimate in estimates:
        if estimate.corrected is not None:
            by_link.setdefault(estimate.link, []).append(estimate)
    fitted = []
    for found in by_link.values():
        found.sort(key=lambda item: item.bytes)
        fitted.append(replace(found[-1], corrected=_through(found[0], found[-1])))
    return correct_links(cluster, fitted) if fitted else cluster


def _through(small: LinkEstimate, large: LinkEstimate) -> Link:
    assert large.corrected is not None
    if large.bytes < _APART * small.bytes or large.measured <= small.measured:
        return large.corrected
    slope = (large.measured - small.measured) / (large.bytes - small.bytes)
    latency = small.measured - slope * small.bytes
    if latency < 0:
        return replace(large.corrected, bandwidth=large.bytes / large.measured, latency=0.0)
    return replace(large.corrected, bandwidth=1 / slope, latency=latency)
