"""The links between a plan's stages, by name and rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bapipe.records.plan import Plan
from bapipe.units import format_bandwidth

__all__ = ["CutLink", "cut_links"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutLink:
    """What joins two neighbouring stages."""

    names: tuple[str, ...]
    """of the links between their replicas: within, between, a level's, or a pair's"""
    bandwidth: float
    """bytes/s of the slowest of them, uplinks on its way included"""
    uplinks: tuple[str, ...]
    """levels whose uplinks they cross"""

    @property
    def words(self) -> str:
        """In a few words, such as: rack, 25 GB/s over the uplinks of node."""
        if not self.names:
            return "on one accelerator"
        over = f" over the uplinks of {', '.join(self.uplinks)}" if self.uplinks else ""
        return f"{'/'.join(self.names)}, {format_bandwidth(self.bandwidth)}{over}"


def cut_links(plan: Plan) -> tuple[CutLink, ...]:
    """One for each cut; none where all accelerators have the same link."""
    cluster = plan.cluster
    if len(cluster.links) < 2:
        return ()
    index = {item.name: place for place, item in enumerate(cluster.accelerators)}
    found = []
    for ahead, behind in zip(plan.stages[:-1], plan.stages[1:], strict=True):
        names: dict[str, None] = {}
        uplinks: dict[str, None] = {}
        slowest = math.inf
        turns = math.lcm(len(ahead.accelerators), len(behind.accelerators))
        for turn in range(turns):
            ends = (
                index[ahead.accelerators[turn % len(ahead.accelerators)]],
                index[behind.accelerators[turn % len(behind.accelerators)]],
            )
            if ends[0] == ends[1]:
                continue
            names[cluster.link_name(*ends)] = None
            slowest = min(slowest, cluster.link(*ends).bandwidth)
            uplinks.update(dict.fromkeys(str(key[1]) for key, _ in cluster.uplinks(*ends)))
        found.append(CutLink(names=tuple(names), bandwidth=slowest, uplinks=tuple(uplinks)))
    return tuple(found)
