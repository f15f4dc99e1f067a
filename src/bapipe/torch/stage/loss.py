"""The loss of a mini-batch from the losses of its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bapipe.errors import BaPipeError
from bapipe.torch.capturing.torch_internals import flatten

__all__ = ["LossFunction", "LossOfEach", "LossSum"]

LossFunction = Callable[[Any, Any], Any]
"""`loss_fn(output, target)`: a mean over samples, or (sum, count)"""


class LossSum:
    """Sums the micro-batches' losses so that the gradients are those of the whole mini-batch.

    A mean over samples is weighted by its micro-batch's share of the mini-batch. Of (sum, count), whose total is
    known only at the end, the sum is differentiated and the gradients are divided afterwards.
    """

    def __init__(self, function: LossFunction | None, sizes: Sequence[int]) -> None:
        """Without a function the model returns its loss: the first scalar of its output, a mean over samples."""
        self._function = function
        self._sizes = tuple(sizes)
        self._samples = sum(sizes)
        self._totals: list[Tensor] = []
        self._counts: list[Tensor | float] = []
        self.scale: Tensor | None = None
        """what every loss is multiplied with before its backward (fp16)"""

    def begin(self) -> None:
        self._totals.clear()
        self._counts.clear()

    def of(self, output: Any, target: Any, microbatch: int, *, count: bool) -> Tensor:
        """The part of the loss to differentiate; it is added to the sums if it is to `count`."""
        found = _first_scalar(output) if self._function is None else self._function(output, target)
        if isinstance(found, tuple) and len(found) == 2:
            loss, number = self._scalar(found[0]), found[1]
            if count:
                self._counts.append(number.detach() if isinstance(number, Tensor) else float(number))
        else:
            loss = self._scalar(found) * (self._sizes[microbatch] / self._samples)
        if count:
            self._totals.append(loss.detach())
        return loss if self.scale is None else loss * self.scale

    def _scalar(self, loss: object) -> Tensor:
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise BaPipeError(
                "the loss must be one number, the mean over the samples, or (sum, count); got "
                f"{type(loss).__name__}{f' of shape {tuple(loss.shape)}' if isinstance(loss, Tensor) else ''}"
            )
        return loss.reshape(())

    def sums(self) -> tuple[float, float]:
        """The sums of losses and counts, which are then forgotten; a count of 0: losses are weighted means."""
        total = float(torch.stack([value.double() for value in self._totals]).sum()) if self._totals else 0.0
        count = float(sum(float(number) for number in self._counts))
        self.begin()
        return total, count


class LossOfEach(LossSum):
    """Every micro-batch is a mini-batch of its own: its loss is its mean, whatever the others'."""

    def __init__(self, function: LossFunction | None) -> None:
        super().__init__(function, (1,))
        self._means: list[Tensor] = []

    def of(self, output: Any, target: Any, microbatch: int, *, count: bool) -> Tensor:
        loss = super().of(output, target, microbatch, count=True)
        if self._counts:
            loss = loss / self._counts[0]
        self.begin()
        if count:
            self._means.append(loss.detach())
        return loss

    def taken(self) -> list[float]:
        """The losses since it was last asked, in the order of the forwards."""
        found = [float(loss) for loss in self._means]
        self._means.clear()
        return found


def _first_scalar(output: Any) -> Tensor:
    for leaf in flatten(output)[0]:
        if isinstance(leaf, Tensor) and leaf.ndim == 0 and leaf.is_floating_point():
            return leaf
    raise BaPipeError("the model's output holds no scalar to train on; give a loss_fn(output, target)")
