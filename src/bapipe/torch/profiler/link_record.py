"""What was measured between ranks, and the link that it amounts to. Uses no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bapipe.hardware.cluster import CollectiveRates, FsdpUnits, Link
from bapipe.io.files import read_versioned
from bapipe.torch.profiler.statistics import SampleSummary

__all__ = [
    "LINKS_SCHEMA",
    "LinkMeasurement",
    "LinkSample",
    "collective_bandwidth",
    "collective_rates",
    "fit",
    "fsdp_units",
    "links_of",
    "read_links",
]

LINKS_SCHEMA = "bapipe.links/1"
_FULL_DUPLEX = 0.75
"""share of its one-way rate that each direction must keep for a link to count as full duplex"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSample:
    """One message size between two ranks."""

    first: int
    second: int
    nbytes: int
    both: bool
    """both directions at once; else from the first to the second"""
    busy: bool = False
    """while both ranks compute"""
    pairs: int = 1
    """pairs of neighbours that exchange at once, of which this is the first"""
    seconds: SampleSummary

    def with_values(self, values: Sequence[float]) -> LinkSample:
        """The same with another rank's (median, low, high, count)."""
        median, low, high, count = values
        return replace(self, seconds=SampleSummary(median=median, low=low, high=high, count=int(count)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMeasurement:
    """All of one `bapipe profile --links`."""

    schema: str = LINKS_SCHEMA
    ranks: int
    backend: str
    """the transport between two ranks"""
    sums: str = "gloo"
    """the backend of the sums"""
    reason: str = ""
    """why these, in one line"""
    device: str
    pairs: tuple[LinkSample, ...]
    together: tuple[LinkSample, ...] = ()
    """all pairs of neighbours at once"""
    all_reduce: tuple[LinkSample, ...]
    """over the ranks from the first to the second"""
    buckets: tuple[LinkSample, ...] = ()
    """all-reduces that are queued one behind the other: bytes and seconds of all of them"""
    gather: tuple[LinkSample, ...] = ()
    """all-gathers, of the bytes that each rank has afterwards"""
    scatter: tuple[LinkSample, ...] = ()
    """reduce-scatters, of the bytes that each rank has before"""
    unit_gather: tuple[LinkSample, ...] = ()
    """what FSDP2 takes on CPUs to gather a unit, of the bytes of its weights; (): on GPUs, or not measured"""
    unit_scatter: tuple[LinkSample, ...] = ()
    """likewise to scatter its gradients"""
    overlap: float | None = None
    """share of its time that a sum of all ranks takes nothing from a compute beside it"""


def read_links(path: str | Path) -> LinkMeasurement:
    """The one reader of what a link worker writes."""
    return read_versioned(LinkMeasurement, path, schema=LINKS_SCHEMA)


def fit(samples: Sequence[LinkSample]) -> tuple[float, float]:
    """(latency, bandwidth) of time = latency + bytes / bandwidth.

    Latency is the least message's time; bandwidth the slope from there to the messages of at least a mebibyte,
    each weighed alike, or to the largest where none is that large. Where the larger ones take no longer than the
    least, as they may between slices of one GPU, the largest one's rate is a bound from below, and is taken.
    """
    ordered = sorted(samples, key=lambda item: item.nbytes)
    base = ordered[0]
    large = [item for item in ordered[1:] if item.nbytes >= 2**20] or ordered[-1:]
    slopes = [
        (item.seconds.median - base.seconds.median) / (item.nbytes - base.nbytes)
        for item in large
        if item.nbytes > base.nbytes
    ]
    mean = sum(slopes) / len(slopes) if slopes else 0.0
    bound = ordered[-1].seconds.median / max(1, ordered[-1].nbytes)
    return base.seconds.median, 1 / (mean if mean > 0 else bound)


def links_of(measured: LinkMeasurement) -> dict[tuple[int, int], Link]:
    """Each measured pair's link: half duplex where both directions at once are much slower than one.

    Of two directions the slower counts. Where all pairs at once are slower than one, or ranks that compute than
    idle ones, every link is slower by that factor: that is how a run uses them.
    """
    links = {}
    alone = [item for item in measured.pairs if not item.busy]
    slower = _slowdown(measured)
    for pair in dict.fromkeys((min(item.first, item.second), max(item.first, item.second)) for item in alone):
        own = [item for item in alone if {item.first, item.second} == set(pair)]
        ways = [
            fit([item for item in own if not item.both and item.first == sender])
            for sender in pair
            if any(not item.both and item.first == sender for item in own)
        ]
        latency = max(way[0] for way in ways)
        one = min(way[1] for way in ways) / slower
        both = fit([item for item in own if item.both])[1] / slower
        full = both >= _FULL_DUPLEX * one
        links[pair] = Link(
            bandwidth=min(one, both) if full else min(one, 2 * both),
            latency=latency,
            duplex="full" if full else "half",
        )
    return links


def _slowdown(measured: LinkMeasurement) -> float:
    """How much longer the largest messages take where all pairs exchange at once while all ranks compute."""
    together = [item for item in measured.together if item.busy]
    if not together:
        return 1.0
    largest = max(together, key=lambda item: item.nbytes)
    alone = [
        item.seconds.median
        for item in measured.pairs
        if item.both and not item.busy and item.nbytes == largest.nbytes
    ]
    return max(1.0, largest.seconds.median / max(alone)) if alone else 1.0


def collective_bandwidth(measured: LinkMeasurement) -> float | None:
    """The rate of a ring that would take as long as the all-reduce did: 2(r−1)/r · bytes / time."""
    idle = [item for item in measured.all_reduce if not item.busy]
    return _ring_rate(measured, idle, 2.0)


def collective_rates(measured: LinkMeasurement) -> CollectiveRates:
    """The same of the other collectives, from the largest of each: what a step sends is large."""
    return CollectiveRates(
        buckets=_ring_rate(measured, _ends(measured.buckets), 2.0),
        gather=_ring_rate(measured, _ends(measured.gather), 1.0),
        scatter=_ring_rate(measured, _ends(measured.scatter), 1.0),
    )


def fsdp_units(measured: LinkMeasurement) -> FsdpUnits | None:
    """What FSDP2 takes for a unit, from the least and the largest; None: not measured."""
    if not measured.unit_gather or not measured.unit_scatter:
        return None
    fits = [fit(_ends(samples)) for samples in (measured.unit_gather, measured.unit_scatter)]
    gather, scatter = (Link(bandwidth=bandwidth, latency=latency) for latency, bandwidth in fits)
    return FsdpUnits(gather=gather, scatter=scatter)


def _ends(samples: Sequence[LinkSample]) -> list[LinkSample]:
    """The least and the largest."""
    sizes = [item.nbytes for item in samples]
    return [item for item in samples if item.nbytes in (min(sizes), max(sizes))]


def _ring_rate(measured: LinkMeasurement, samples: Sequence[LinkSample], rounds: float) -> float | None:
    """Of a collective among all ranks that sends all of its bytes so often around the ring; None: not measured."""
    if measured.ranks < 2 or not samples:
        return None
    most = max(item.second for item in samples)
    _, rate = fit([item for item in samples if item.second == most])
    return rounds * (measured.ranks - 1) / measured.ranks * rate
