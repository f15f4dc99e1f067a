"""Links as a cluster file has them: bandwidth and latency as texts or numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bapipe.errors import FileFormatError
from bapipe.hardware.cluster import Link, Uplink
from bapipe.units import parse_bandwidth, parse_seconds, parse_share

__all__ = ["LinkEntry", "UplinkEntry", "read_bandwidth", "read_link", "read_uplink"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEntry:
    """[links.within], [links.between], the link of [[levels]]."""

    bandwidth: str | float
    latency: str | float = 0.0
    duplex: Literal["full", "half"] = "full"
    spread: str | float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UplinkEntry:
    """The uplink of [[levels]]."""

    bandwidth: str | float
    duplex: Literal["full", "half"] = "full"


def read_bandwidth(value: str | float, *, where: str, what: str = "bandwidth") -> float:
    """bytes/s, more than 0; `what` is the name of the entry."""
    what = f"{where}: {what}"
    rate = parse_bandwidth(value, what=what)
    if not rate > 0:
        raise FileFormatError(f"{what} must be more than 0, got {value}; correct it")
    return rate


def read_link(entry: LinkEntry, *, where: str) -> Link:
    """The link of an entry; `where` names it in errors."""
    return Link(
        bandwidth=read_bandwidth(entry.bandwidth, where=where),
        latency=parse_seconds(entry.latency, what=f"{where}: latency"),
        duplex=entry.duplex,
        spread=parse_share(entry.spread, what=f"{where}: spread"),
    )


def read_uplink(entry: UplinkEntry, *, where: str) -> Uplink:
    """The uplink of an entry."""
    return Uplink(bandwidth=read_bandwidth(entry.bandwidth, where=where), duplex=entry.duplex)
