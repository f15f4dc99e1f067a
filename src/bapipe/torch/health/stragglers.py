"""A rank that has become slower than its own past, or is slower than its plan: which, and what it costs.

Every rank's seconds of compute in a step are known on all ranks, because they travel with the sum of the losses;
so all ranks come to the same verdict, and nothing waits for it. Steps are judged in windows, by medians:

    step      2 ………… 9  10 ………… 17  18 ………… 25
    rank 0    12 ms     12 ms       12 ms
    rank 1    11 ms     11 ms       58 ms         5.3x its own past: named after step 25

A rank is named where it computes much longer than expected, and the run would be noticeably faster if it did not.
What it costs is an estimate: the step would be shorter by what the rank takes too long, but not shorter than any
other rank computes. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from bapipe.records.plan import Plan
from bapipe.schedule.actions import Kind
from bapipe.units import format_seconds

__all__ = ["QUIET_STEPS", "WINDOW", "Straggler", "StragglerMonitor", "planned_seconds"]

WINDOW = 8
"""steps that are judged together"""
QUIET_STEPS = 48
"""steps in which a rank is named once at most"""
_WARM_UP = 2
"""first steps, which are not judged"""
_SLOWER_THAN_PAST = 1.5
_SLOWER_THAN_PLAN = 2.0
"""times as long as the other ranks take, of what each is planned to take: predictions are off by less"""
_SHARE = 0.1
"""of the samples/s that a rank must cost to be named"""
_NOISE = 0.005
"""seconds of a step that are not worth a word"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A rank that holds the others up."""

    rank: int
    step: int
    """after which it was found"""
    seconds: float
    """that it computes in a step"""
    expected: float
    """seconds that it computed before, or should by the plan at the pace of the other ranks"""
    against: Literal["past", "plan"]
    """what it is slower than"""
    throughput: float
    """samples/s of the run now"""
    lost: float
    """samples/s more that the run would have without the slowness, about"""

    @property
    def factor(self) -> float:
        """How many times what is expected the rank takes."""
        return self.seconds / self.expected

    @property
    def line(self) -> str:
        """The line for a user."""
        past = self.against == "past"
        was = "before" if past else "by the plan at the other ranks' pace"
        return (
            f"rank {self.rank} {'has become slow' if past else 'is slower than planned'}: in steps "
            f"{self.step - WINDOW + 1} to {self.step} it computes {format_seconds(self.seconds)} a step, "
            f"{format_seconds(self.expected)} {was} ({self.factor:.1f}x), which costs about {self.lost:.1f} "
            f"samples/s of {self.throughput + self.lost:.1f}"
        )


def planned_seconds(plan: Plan) -> tuple[float, ...] | None:
    """Seconds that each rank computes in a step by the plan; None where the plan predicts nothing."""
    if plan.prediction.source == "none":
        return None
    schedule, names = plan.schedule.to_schedule(), plan.ranks
    total = [0.0] * schedule.num_ranks
    for lane in schedule.lanes:
        for action in lane:
            if action.microbatch is None:
                continue
            stage = plan.stages[action.stage].on(names[lane.rank])
            total[lane.rank] += {
                Kind.F: stage.forward,
                Kind.R: stage.forward,
                Kind.B: stage.backward,
                Kind.I: stage.backward - stage.weight_gradient,
                Kind.W: stage.weight_gradient,
            }[action.kind]
    return tuple(total) if min(total) > 0 else None


class StragglerMonitor:
    """Is told of every step what each rank computed, and names a rank that is slow."""

    def __init__(self, planned: Sequence[float] | None, *, global_batch: int) -> None:
        """`planned` are each rank's seconds of compute by the plan; None: ranks are compared with their past
        only."""
        self._planned = planned
        self._global_batch = global_batch
        self._seen = 0
        self._steps: list[tuple[Sequence[float], float]] = []
        """compute of each rank, and seconds of the step; of the window that is not full yet"""
        self._best: list[float] = []
        """each rank's least median of a window"""
        self._named: dict[int, int] = {}
        """rank -> step at which it was named last"""

    def observe(self, step: int, busy: Sequence[float], seconds: float) -> Straggler | None:
        """One more step: every rank's seconds of compute and the seconds of the whole. The rank that costs most,
        at the end of a window in which there is one."""
        self._seen += 1
        if self._seen <= _WARM_UP or seconds <= 0 or min(busy) <= 0:
            return None
        self._steps.append((tuple(busy), seconds))
        if len(self._steps) < WINDOW:
            return None
        now = [median(own) for own in zip(*(ranks for ranks, _ in self._steps), strict=True)]
        length = median(whole for _, whole in self._steps)
        self._steps.clear()
        found = [item for rank in range(len(now)) if (item := self._judged(step, rank, now, length)) is not None]
        self._best = [min(pair) for pair in zip(now, self._best or now, strict=True)]
        worst = max(found, key=lambda item: item.lost, default=None)
        if worst is not None:
            self._named[worst.rank] = step
        return worst

    def _judged(self, step: int, rank: int, now: Sequence[float], length: float) -> Straggler | None:
        if step - self._named.get(rank, -QUIET_STEPS) < QUIET_STEPS:
            return None
        others = [other for other in range(len(now)) if other != rank]
        found: list[Straggler] = []
        if self._best and now[rank] > _SLOWER_THAN_PAST * self._best[rank]:
            found.append(self._straggler(step, rank, now, length, self._best[rank], "past"))
        if self._planned is not None and others:
            pace = median(now[other] / self._planned[other] for other in others)
            if now[rank] > _SLOWER_THAN_PLAN * pace * self._planned[rank]:
                found.append(self._straggler(step, rank, now, length, pace * self._planned[rank], "plan"))
        costly = [
            item
            for item in found
            if item.lost > _SHARE * item.throughput and item.seconds - item.expected > _NOISE
        ]
        return costly[0] if costly else None

    def _straggler(
        self,
        step: int,
        rank: int,
        now: Sequence[float],
        length: float,
        expected: float,
        against: Literal["past", "plan"],
    ) -> Straggler:
        others = max((seconds for other, seconds in enumerate(now) if other != rank), default=0.0)
        without = max(length - (now[rank] - expected), others, expected)
        throughput = self._global_batch / length
        return Straggler(
            rank=rank,
            step=step,
            seconds=now[rank],
            expected=expected,
            against=against,
            throughput=throughput,
            lost=max(0.0, self._global_batch / without - throughput),
        )
