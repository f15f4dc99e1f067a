"""Medians with their confidence intervals, and when to stop sampling. Pure: no torch, no clock."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bapipe.errors import BaPipeError

__all__ = ["CONFIDENCE", "SampleSummary", "Stopping", "middle", "pooled", "summarise"]

CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSummary:
    """What is kept of repeated samples of one time."""

    median: float
    """seconds"""
    low: float
    """lower end of the median's 95 % interval (of fewer than 6 samples: the least)"""
    high: float
    count: int

    @property
    def half_width(self) -> float:
        """Half of the interval, relative to the median."""
        return (self.high - self.low) / 2 / self.median if self.median > 0 else 0.0


@functools.cache
def _rank(count: int) -> int:
    """Order statistics to leave out at each end for a 95 % interval of the median; 0 where all are needed."""
    tail, rank = 0.0, 0
    for drawn in range(count // 2):
        tail += (
            math.exp(math.lgamma(count + 1) - math.lgamma(drawn + 1) - math.lgamma(count - drawn + 1)) / 2**count
        )
        if 2 * tail > 1 - CONFIDENCE:
            break
        rank = drawn
    return rank


def summarise(samples: Sequence[float]) -> SampleSummary:
    """Median and its distribution-free interval, from the binomial law of order statistics."""
    assert samples, "nothing was sampled"
    ordered = sorted(samples)
    rank = _rank(len(ordered)) if len(ordered) < 1000 else int(len(ordered) / 2 - 0.98 * math.sqrt(len(ordered)))
    return SampleSummary(
        median=statistics.median(ordered), low=ordered[rank], high=ordered[-1 - rank], count=len(ordered)
    )


def pooled(parts: Sequence[SampleSummary]) -> SampleSummary:
    """Rounds of the same thing as one: the mean of the medians, the intervals' hull.

    Each round counts alike whatever its samples: a machine whose speed drifts between rounds then changes the sum
    of layers and the whole step by the same factor.
    """
    assert parts, "nothing was measured"
    count = sum(part.count for part in parts)
    return SampleSummary(
        median=sum(part.median for part in parts) / len(parts),
        low=min(part.low for part in parts),
        high=max(part.high for part in parts),
        count=count,
    )


def middle(parts: Sequence[SampleSummary]) -> SampleSummary:
    """Repeats of the same long thing as one: the median of the medians, the intervals' hull.

    Of three or more, one that the machine was busy in does not count, where `pooled` would let it in.
    """
    assert parts, "nothing was measured"
    return SampleSummary(
        median=statistics.median(part.median for part in parts),
        low=min(part.low for part in parts),
        high=max(part.high for part in parts),
        count=sum(part.count for part in parts),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """When one round has sampled one thing often enough."""

    minimum: int = 3
    maximum: int = 25
    half_width: float = 0.02
    """relative half-width of the median's interval at which to stop"""
    seconds: float = 0.05
    """after the minimum, stop when so much time was spent on this thing"""
    exact: int | None = None
    """so many samples, whatever their spread; None: by confidence"""

    def __post_init__(self) -> None:
        if self.exact is not None and self.exact < 1:
            raise BaPipeError(f"a layer must be timed at least once, got {self.exact} iterations; raise them")
        if not 1 <= self.minimum <= self.maximum:
            raise BaPipeError(f"sampling needs 1 <= minimum <= maximum, got {self.minimum} and {self.maximum}")

    def done(self, samples: Sequence[float], *, spent: float) -> bool:
        """Whether these samples, taken in `spent` seconds, are enough."""
        if self.exact is not None:
            return len(samples) >= self.exact
        if len(samples) < self.minimum:
            return False
        if len(samples) >= self.maximum or spent > self.seconds:
            return True
        return summarise(samples).half_width < self.half_width
