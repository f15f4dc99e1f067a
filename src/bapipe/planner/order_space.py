"""The orders that a request allows for stages of some shape: the schedule, and how many micro-batches wait."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bapipe.planner.planned_order import PlannedOrder
from bapipe.planner.request import Request
from bapipe.schedule.inflight import (
    declining_caps,
    most_inflight,
    ranks_behind,
    stage_caps,
    weight_gradient_delays,
)

__all__ = ["DATA_PARALLEL", "OrderSpace", "order_spaces"]

_BY_RULE = ("1f1b-sno", "1f1b-so", "gpipe")
_WEIGHT_DELAYS = (None, 0, 1)
"""most micro-batches by which zb's weight gradients wait that are tried; None: as many as the first stage holds"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSpace:
    """A schedule whose in-flight micro-batches may be chosen, or follow from its name."""

    name: str
    replicas: bool = False
    """whether stages may be replicated"""
    whole: bool = False
    """whether only whole pipelines may be, so that all stages have as many replicas"""
    cap: int | None = None
    """of 1f1b, K of the first stage where it is asked for"""
    recompute: bool = False
    """whether some stages may recompute"""

    def allows(self, counts: tuple[int, ...]) -> bool:
        """Whether stages may have so many replicas."""
        return max(counts) == 1 or (self.replicas and not (self.whole and len(set(counts)) > 1))

    @property
    def chooses(self) -> bool:
        """Whether there are in-flight counts to choose."""
        return self.name in ("1f1b", "zb") and self.cap is None

    def usual(self, counts: tuple[int, ...], microbatches: int) -> Iterator[PlannedOrder]:
        """The orders worth trying first: all micro-batches in flight, 1F1B-SO's and 1F1B-SNO's."""
        if not self.chooses:
            yield self._fixed(counts, microbatches)
            return
        tried = dict.fromkeys(
            self._rounded(
                [most_inflight(rule, behind, microbatches) for behind in ranks_behind(counts)],
                counts,
                microbatches,
            )
            for rule in ("gpipe", "1f1b-so", "1f1b-sno")
        )
        for caps in tried:
            yield from self.of(counts, microbatches, caps)

    def size(self, counts: tuple[int, ...], microbatches: int) -> int:
        """How many orders `every` has, at most."""
        if not self.chooses:
            return 1
        each = math.comb(microbatches + len(counts) - 1, len(counts))
        if self.name != "zb":
            return each
        return each * len(_WEIGHT_DELAYS) + math.comb(microbatches + len(counts) - 2, len(counts) - 1)

    def every(self, counts: tuple[int, ...], microbatches: int) -> Iterator[PlannedOrder]:
        """All in-flight counts of which none is more than that of the stage before."""
        if not self.chooses:
            yield self._fixed(counts, microbatches)
            return
        ranges = [range(-(-microbatches // count) * count, 0, -count) for count in counts]
        for caps in itertools.product(*ranges):
            if all(before >= min(after, microbatches) for before, after in itertools.pairwise(caps)):
                yield from self.of(counts, microbatches, caps)

    def near(self, order: PlannedOrder, counts: tuple[int, ...], microbatches: int) -> Iterator[PlannedOrder]:
        """The same with one stage's count, or that of all stages up to it, one more or less per replica."""
        if not self.chooses:
            return
        caps = list(order.caps)
        seen = {self._rounded(caps, counts, microbatches)}
        for stage, by, together in itertools.product(range(len(counts)), (1, -1, 2, -2), (False, True)):
            changed = [
                cap + by * count if index == stage or (together and index < stage) else cap
                for index, (cap, count) in enumerate(zip(caps, counts, strict=True))
            ]
            trial = self._rounded(changed, counts, microbatches)
            if trial not in seen:
                seen.add(trial)
                yield from self.of(counts, microbatches, trial)

    def of(self, counts: tuple[int, ...], microbatches: int, caps: tuple[int, ...]) -> Iterator[PlannedOrder]:
        """The orders with these in-flight counts, all replicas of a stage together.

        Where the first stage holds all micro-batches, K_0 may stand for more, so that weight gradients also wait
        as long as in zb-h2.
        """
        if self.name != "zb":
            yield PlannedOrder(name=self.name, counts=counts, microbatches=microbatches, caps=caps)
            return
        whole = weight_gradient_delays([cap // count for cap, count in zip(caps, counts, strict=True)])
        tried = [
            tuple(whole) if most is None else tuple(min(own, most) for own in whole) for most in _WEIGHT_DELAYS
        ]
        if caps[0] >= microbatches:
            rule = stage_caps("zb-h2", [1] * len(counts), 2 * len(counts))
            tried.append(tuple(weight_gradient_delays(rule)))
        for delays in dict.fromkeys(tried):
            yield PlannedOrder(name="zb", counts=counts, microbatches=microbatches, caps=caps, delays=delays)

    def _fixed(self, counts: tuple[int, ...], microbatches: int) -> PlannedOrder:
        if self.name == "1f1b":
            assert self.cap is not None
            held = declining_caps(self.cap, counts, microbatches)
        elif self.name == "data-parallel":
            held = list(counts)
        elif self.whole:
            rule = (most_inflight(self.name, behind, microbatches) for behind in ranks_behind((1,) * len(counts)))
            rounds = -(-microbatches // counts[0])
            held = [max(1, min(cap, rounds)) * counts[0] for cap in rule]
        else:
            rule = (most_inflight(self.name, behind, microbatches) for behind in ranks_behind(counts))
            held = [max(1, min(cap, microbatches)) for cap in rule]
        return PlannedOrder(name=self.name, counts=counts, microbatches=microbatches, caps=tuple(held))

    @staticmethod
    def _rounded(caps: Sequence[int], counts: tuple[int, ...], microbatches: int) -> tuple[int, ...]:
        """Whole micro-batches of every replica, from one to all, none less than at the stage after."""
        found: list[int] = []
        for cap, count in zip(reversed(caps), reversed(counts), strict=True):
            after = min(found[-1], microbatches) if found else 1
            most = -(-microbatches // count)
            found.append(min(most, max(1, -(-max(cap, after) // count))) * count)
        return tuple(reversed(found))


DATA_PARALLEL = OrderSpace(name="data-parallel", replicas=True)


def order_spaces(request: Request) -> list[OrderSpace]:
    """What the request allows of the schedules of synchronous accelerators that have one stage a rank."""
    wanted = request.schedule
    if wanted is None:
        return [
            OrderSpace(name="1f1b", replicas=True, recompute=request.whole_stages),
            OrderSpace(name="zb", replicas=True, whole=True),
        ]
    if wanted == "1f1b":
        return [OrderSpace(name="1f1b", replicas=True, recompute=request.whole_stages, cap=request.cap)]
    if wanted in (*_BY_RULE, "zb", "zb-h1", "zb-h2"):
        return [OrderSpace(name=wanted, replicas=wanted != "gpipe", whole=wanted.startswith("zb"))]
    return []
