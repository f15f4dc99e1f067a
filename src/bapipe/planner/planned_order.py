"""An order of actions for stages of some shape, by its in-flight counts; the schedule is made when asked for."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from bapipe.schedule.actions import Schedule
from bapipe.schedule.dealing import Dealing, dealt_counts, most_in_a_row
from bapipe.schedule.generators import SCHEDULES, answered_caps, capped
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
    dealing: tuple[Dealing, ...] | None = None
    """for each stage which of its replicas take which micro-batches; None: in turn"""

    def dealt(self, dealing: tuple[Dealing, ...]) -> list[PlannedOrder]:
        """The same with micro-batches dealt so, and at least as many in flight as that needs.

        Of in-flight counts that say the same in turn the most and the least: otherwise they do not.
        """
        if self.parted:
            return [replace(self, dealing=dealing)]
        if self.name == "data-parallel":
            return [replace(self, dealing=dealing, caps=(1,))]
        least = [
            cap - count + 1 if own else cap
            for cap, count, own in zip(self.caps, self.counts, dealing, strict=True)
        ]
        every = (tuple(answered_caps(caps, self.counts, dealing)) for caps in (self.caps, least))
        return [replace(self, dealing=dealing, caps=caps) for caps in dict.fromkeys(every)]

    @property
    def inflight(self) -> tuple[int, ...]:
        """Micro-batches that one replica of each stage holds at most."""
        return tuple(max(self.inflight_of(stage)) for stage in range(len(self.counts)))

    def inflight_of(self, stage: int) -> list[int]:
        """Micro-batches that each replica of a stage holds at most."""
        cap, count = self.caps[stage], self.counts[stage]
        if self.dealing is None or self.parted:
            return [-(-cap // count)] * count
        return [most_in_a_row(self.dealing[stage], count, replica, cap) for replica in range(count)]

    def taken(self, stage: int) -> tuple[int, ...]:
        """Micro-batches that each replica of a stage takes."""
        dealing = () if self.dealing is None else self.dealing[stage]
        return dealt_counts(dealing, self.counts[stage], self.microbatches)

    @property
    def parted(self) -> bool:
        """Whether backwards are done in two parts, so that only input gradients are waited for."""
        return self.name.startswith("zb")

    @property
    def schedule(self) -> Schedule:
        """The schedule without R, A and U."""
        return _make(self.name, self.counts, self.microbatches, self.caps, self.delays, self.dealing)

    @property
    def actions(self) -> int:
        """How many actions the schedule has, before it is made."""
        kinds = 3 if self.parted else 2
        return kinds * len(self.counts) * self.microbatches + len(self.recompute) * self.microbatches


@functools.lru_cache(maxsize=64)
def _make(
    name: str,
    counts: tuple[int, ...],
    microbatches: int,
    caps: tuple[int, ...],
    delays: tuple[int, ...] | None,
    dealing: tuple[Dealing, ...] | None,
) -> Schedule:
    if name.startswith("zb"):
        each = tuple(cap // count for cap, count in zip(caps, counts, strict=True))

        def pipeline(own: int) -> Schedule:
            if delays is None:
                return SCHEDULES[name](len(counts), own)
            return zero_bubble(len(counts), own, each, delays=delays)

        return replicated(name, pipeline, microbatches, counts, () if dealing is None else dealing[0])
    return capped(len(counts), microbatches, caps, name=name, replicas=counts, dealing=dealing)
