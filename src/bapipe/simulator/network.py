"""The links between ranks, as the simulator sees them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from bapipe.errors import BaPipeError

__all__ = ["Network", "Route"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How data goes from one rank to another."""

    seconds_per_unit: float = 1.0
    """1 where amounts are already seconds; 1/bandwidth where they are bytes"""
    latency: float = 0.0
    link: Hashable = None
    """routes of the same link share it; None: a link of its own per direction"""
    uplinks: tuple[tuple[Hashable, float], ...] = ()
    """what it crosses besides, each with its own seconds per unit: all routes that cross one share it"""


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
