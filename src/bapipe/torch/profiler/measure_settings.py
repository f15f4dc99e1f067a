"""How to measure: which sizes, how often, for how long."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bapipe.torch.profiler.statistics import Stopping

__all__ = ["ROUNDS", "MeasureSettings"]

ROUNDS = 2
"""each thing is measured in two rounds, far apart in time: their difference is the A/A control"""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureSettings:
    """How to measure."""

    microbatches: tuple[int, ...]
    iterations: int | None = None
    """samples of each thing in both rounds together; None: until the median is known well enough"""
    half_width: float = 0.02
    seconds: float = 0.05
    """per layer, size and round, after the least number of samples"""
    seed: int = 0
    """of the order"""
    whole: bool = True
    """measure the whole step too"""
    parts: bool = False
    """time the layers that can be divided in two parts too"""
    folder: Path | None = None
    """of the cache; None: the user's"""
    fresh: bool = False
    """forget what was measured before"""
    deadline: float | None = None
    """time.monotonic() at which to stop as Ctrl-C would"""

    def stopping(self, round_: int) -> Stopping:
        """The rule for one round."""
        exact = None
        if self.iterations is not None:
            first = -(-self.iterations // ROUNDS)
            exact = max(1, first if round_ == 0 else self.iterations - first)
        return Stopping(minimum=3 - round_, half_width=self.half_width, seconds=self.seconds, exact=exact)
