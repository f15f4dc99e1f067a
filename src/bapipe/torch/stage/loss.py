"""The loss of a global batch from the losses of its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bapipe.errors import BaPipeError
from bapipe.torch.stage.loss_weighing import Count, LossFunction, Weighing

__all__ = ["LossFunction", "LossOfEach", "LossSum", "LossTotals", "loss_of_step"]


class LossTotals(NamedTuple):
    """Sums over micro-batches, which may be added over ranks."""

    loss: float
    """of losses, each times its weight"""
    weight: float
    """of the weights of counted means"""
    counted: float
    """how many micro-batches had a counted mean"""
    other: float
    """and how many another one"""

    def divisor(self) -> float | None:
        """What loss and gradients are divided by in the end; None: nothing. Refuses a mix of both."""
        if self.counted and self.other:
            raise BaPipeError(
                "the loss is a mean over a count in some micro-batches only; return (sum, count) in all of them"
            )
        return self.weight if self.counted else None


class LossSum:
    """Sums the micro-batches' losses so that the gradients are those of the whole global batch.

    A mean over samples is weighted by its micro-batch's share of the global batch, a sum by 1. Of a mean over a
    count, whose total is known only at the end, loss × count is differentiated and the gradients are divided
    afterwards. Counts are taken as a part of all positions, so that gradients are about as large before as after.
    """

    def __init__(self, loss: Weighing | LossFunction | None, sizes: Sequence[int]) -> None:
        """Without a function the model returns its loss, a mean over samples unless `Weighing` knows better."""
        self._weigh = loss if isinstance(loss, Weighing) else Weighing(loss)
        self._sizes = tuple(sizes)
        self._samples = sum(sizes)
        self._totals: list[Tensor] = []
        self._weights: list[Tensor | float] = []
        self._others = 0
        self.scale: Tensor | None = None
        """what every loss is multiplied with before its backward (fp16)"""

    def begin(self, sizes: Sequence[int] | None = None) -> None:
        """A global batch begins; `sizes` are its micro-batches' samples from now on, None: as they were."""
        if sizes is not None:
            self._sizes, self._samples = tuple(sizes), sum(sizes)
        self._totals.clear()
        self._weights.clear()
        self._others = 0

    def of(
        self, output: Any, target: Any, microbatch: int, *, count: bool, tokens: Tensor | None = None
    ) -> Tensor:
        """The part of the loss to differentiate; it is added to the sums if it is to `count`.

        `tokens` is what the stage counted for the model's own loss.
        """
        size = self._sizes[microbatch]
        found = self._weigh(output, target, size, tokens)
        if found.kind == "counted":
            weight = _number(found.count, found.loss) / (self._samples * found.positions)
            loss = found.loss * weight
            if count:
                self._weights.append(weight)
        else:
            loss = found.loss if found.kind == "sum" else found.loss * (size / self._samples)
            self._others += count and found.kind != "none"
        if count:
            self._totals.append(loss.detach())
        return loss if self.scale is None else loss * self.scale

    def sums(self) -> LossTotals:
        """The sums of losses and weights, which are then forgotten."""
        totals = LossTotals(
            loss=float(torch.stack([value.double() for value in self._totals]).sum()) if self._totals else 0.0,
            weight=float(sum(float(weight) for weight in self._weights)),
            counted=len(self._weights),
            other=self._others,
        )
        self.begin()
        return totals


class LossOfEach(LossSum):
    """Every micro-batch is a global batch of its own: its loss is its mean, whatever the others'."""

    def __init__(
        self,
        loss: Weighing | LossFunction | None,
        size: int = 1,
        taken: list[tuple[Tensor, Tensor | float]] | None = None,
    ) -> None:
        super().__init__(loss, (size,))
        self._taken: list[tuple[Tensor, Tensor | float]] = [] if taken is None else taken

    def of_size(self, size: int) -> LossOfEach:
        """The same for micro-batches of another size; what is taken is taken of both."""
        return LossOfEach(self._weigh, size, self._taken)

    def of(
        self, output: Any, target: Any, microbatch: int, *, count: bool, tokens: Tensor | None = None
    ) -> Tensor:
        size = self._sizes[microbatch]
        found = self._weigh(output, target, size, tokens)
        weight: Tensor | float = float(size)
        if found.kind == "counted":
            weight = _number(found.count, found.loss)
        elif found.kind in ("sum", "none"):
            weight = 0.0
        if count:
            self._taken.append((found.loss.detach(), weight))
        return found.loss

    def taken(self) -> list[tuple[float, float]]:
        """The losses since it was last asked, in the order of the forwards, and their weights."""
        found = [(float(loss), float(weight)) for loss, weight in self._taken]
        self._taken.clear()
        return found


def loss_of_step(losses: Sequence[float], weights: Sequence[float]) -> float:
    """The loss of a global batch from those of its micro-batches; of sums, which have no weights, their sum."""
    total = sum(weights)
    if not total:
        return sum(losses)
    return sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / total


def _number(count: Count, loss: Tensor) -> Tensor | float:
    """A count in a dtype that holds it without rounding."""
    if not isinstance(count, Tensor):
        return float(count)
    return count.detach().to(loss.device, torch.float64 if loss.dtype == torch.float64 else torch.float32)
