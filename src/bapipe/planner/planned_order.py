"""An order of actions for stages of some shape, by its in-flight counts; the schedule is made when asked for."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from bapipe.schedule.actions import Schedule
from bapipe.schedule.generators import SCHEDULES, capped
from bapipe.schedule.replicas import replicated
from bapipe.schedule.zero_bubble import zero_bubble

__all__ = ["PlannedOrder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOrder:
    """A schedule for stages of some shape, and what bounds its time before it is simulated."""

    name: str
    counts: tuple[int, ...]
    """replicas of each stage"""
    microbatches: int
    caps: tuple[int, ...]
    """in-flight micro-batches of each stage, all replicas together"""
    delays: tuple[int, ...] | None = None
    """of zb, by how many micro-batches each replica of a stage defers its weight gradients"""
    recompute: tuple[int, ...] = ()
    """stages that recompute"""

    @property
    def inflight(self) -> tuple[int, ...]:
        """Micro-batches that one replica of each stage holds at most."""
        return tuple(-(-cap // count) for cap, count in zip(self.caps, self.counts, strict=True))

    @property
    def parted(self) -> bool:
        """Whether backwards are done in two parts, so that only input gradients are waited for."""
        return self.name.startswith("zb")

    @property
    def schedule(self) -> Schedule:
        """The schedule without R, A and U."""
        return _make(self.name, self.counts, self.microbatches, self.caps, self.delays)

    @property
    def actions(self) -> int:
        """How many actions the schedule has, before it is made."""
        kinds = 3 if self.parted else 2
        return kinds * len(self.counts) * self.microbatches + len(self.recompute) * self.microbatches


@functools.lru_cache(maxsize=64)
def _make(
    name: str, counts: tuple[int, ...], microbatches: int, caps: tuple[int, ...], delays: tuple[int, ...] | None
) -> Schedule:
    if name.startswith("zb"):
        each = tuple(cap // count for cap, count in zip(caps, counts, strict=True))

        def pipeline(own: int) -> Schedule:
            if delays is None:
                return SCHEDULES[name](len(counts), own)
            return zero_bubble(len(counts), own, each, delays=delays)

        return replicated(name, pipeline, microbatches, counts)
    return capped(len(counts), microbatches, caps, name=name, replicas=counts)
