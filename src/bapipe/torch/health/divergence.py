"""Gradients that grow and grow while the loss is still a number: when, and in which layer. Imports no torch.

Every eighth step the joint norm of all gradients is set beside what it usually was, the median of earlier ones:

    step       7     15     23     31     39     47     55
    norm     3.1    2.8    2.9    2.7    2.9   61.0  480.0
                                              21x    166x      ten times what it was, twice in a row: reported

One large norm is a hard batch, which training gets over; a thousandfold one is reported at once. All ranks know
the same norms and come to the same verdict.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median

__all__ = ["EVERY", "DivergenceMonitor", "Diverging"]

EVERY = 8
"""steps from one look to the next"""
_KNOWN = 4
"""norms that must be known before one is judged"""
_KEPT = 16
"""norms that the usual one is the median of"""
_LARGE = 10.0
"""times the usual norm, twice in a row"""
_HUGE = 1000.0
"""times the usual norm, once"""
_QUIET = 12
"""looks after a report in which there is no other"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diverging:
    """Gradients that have become much larger than they were."""

    step: int
    """global batches that were trained before"""
    norm: float
    """of all gradients together"""
    usual: float
    """what it was before"""
    rank: int
    """of the layer that has most of it"""
    stage: int
    layer: str
    share: float
    """of the norm, that this layer's own has"""

    @property
    def line(self) -> str:
        """All of it on one line."""
        return (
            f"step {self.step}: the gradients diverge: their norm is {self.norm:.3g}, "
            f"{self.norm / self.usual:.0f} times what it was; layer '{self.layer}' on rank {self.rank}, "
            f"stage {self.stage}, has {100 * self.share:.0f} % of it; lower the learning rate, or clip gradients"
        )


class DivergenceMonitor:
    """Is given the norm of the gradients now and then, and says when it has become too large."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=_KEPT)
        self._large = 0
        """norms in a row that were large"""
        self._quiet = 0
        """looks that are left in which nothing is reported"""

    def is_due(self, step: int) -> bool:
        """Whether the norm after this step is to be looked at; the same on all ranks."""
        return step % EVERY == EVERY - 1

    def observe(self, norm: float) -> float | None:
        """The usual norm, where this one shows that the gradients diverge; else None. What is not finite is left
        to others."""
        self._quiet = max(0, self._quiet - 1)
        if not math.isfinite(norm) or norm <= 0:
            return None
        usual = median(self._norms) if len(self._norms) >= _KNOWN else None
        if usual is None or norm < _LARGE * usual:
            self._norms.append(norm)
            self._large = 0
            return None
        self._large += 1
        if self._quiet or (self._large < 2 and norm < _HUGE * usual):
            return None
        self._quiet = _QUIET
        return usual
