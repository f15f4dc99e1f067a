"""How the loss of a micro-batch joins those of the others, as the loss says or as it is found out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bapipe.errors import BaPipeError, first_line
from bapipe.torch.capturing.loss_graph import NO_LOSS, OwnLoss
from bapipe.torch.capturing.loss_kinds import LossKind, counted, ratio
from bapipe.torch.capturing.torch_internals import flatten
from bapipe.torch.stage.loss_watch import LossWatch

__all__ = ["Count", "LossFunction", "Weighed", "Weighing", "token_mean"]

LossFunction = Callable[[Any, Any], Any]
"""`loss_fn(output, target)`: a mean or sum that is recognised, or (sum, count)"""
Count = Tensor | float | int


def token_mean(
    loss_fn: Callable[[Any, Any], Tensor], count: Callable[[Any, Any], Count]
) -> Callable[[Any, Any], tuple[Tensor, Count]]:
    """A loss that says over how much it is a mean: `count(output, target)` of what it is given.

        loss_fn = token_mean(my_loss, count=lambda output, target: (target != PAD).sum())

    Micro-batches then weigh by their counts, so that the gradients are those of one mean over the global batch.
    Returns a function that gives (sum, count). Where the count is 0 the sum is 0; `loss_fn` must have finite
    gradients there, as cross entropy has.
    """

    def loss(output: Any, target: Any) -> tuple[Tensor, Count]:
        mean, number = loss_fn(output, target), count(output, target)
        if isinstance(number, Tensor):
            return mean.masked_fill(number == 0, 0) * number.detach().to(mean.dtype), number
        return mean.masked_fill(torch.tensor(number == 0, device=mean.device), 0) * number, number

    return loss


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weighed:
    """The loss of a micro-batch by itself."""

    loss: Tensor
    kind: str
    """counted, sum, mean; none: 0 or a constant, whatever the others are"""
    count: Count = 1
    """of a counted mean"""
    positions: float = 1.0
    """per sample about how much is counted at most; the same for all micro-batches of a global batch"""


class Weighing:
    """Says how losses are weighed. A loss that is not known warns once and weighs by samples, as a mean over
    them."""

    def __init__(self, function: LossFunction | None, own: OwnLoss | None = None, *, warns: bool = True) -> None:
        """Without a function the model returns its loss; `own` is what its capture says of that."""
        self._function = function
        self._own = own
        self._warns = warns
        self._settled: str | None = None
        """what the function was found to be, where it need not be watched any more"""

    def __call__(self, output: Any, target: Any, size: int, tokens: Tensor | None = None) -> Weighed:
        """The loss of `size` samples; `tokens` is what the last stage counted for the model's own loss."""
        if self._function is None:
            return self._of_model(output, tokens)
        if self._settled is not None:
            found, kind = _called(self._function, output, target), LossKind(self._settled)
        else:
            scalars = {} if self._own is None else {self._own.leaf: self._own_kind(tokens)}
            with LossWatch(output, target, size, scalars) as watch:
                found = _called(self._function, output, target)
            kind = watch.kind_of(found)
        positions = _positions(target)
        if isinstance(found, tuple) and len(found) == 2:
            self._settled = "counted"
            total, count = _scalar(found[0]), found[1]
            return Weighed(loss=ratio(total, count), kind="counted", count=count, positions=positions)
        loss = _scalar(found)
        if kind.name == "counted" and kind.count is not None:
            return Weighed(loss=loss, kind="counted", count=kind.count, positions=positions)
        if kind.name in ("fixed", "zero"):
            return Weighed(loss=loss, kind="none")
        if self._settled is None:
            self._settled = kind.name
            if kind.name not in ("mean", "sum"):
                self._warn(
                    "it is not known over what the loss is a mean, so micro-batches weigh by their samples; "
                    "return (sum, count) from it, or wrap it in bapipe.torch.token_mean"
                )
        return Weighed(loss=loss, kind="sum" if kind.name == "sum" else "mean")

    def _of_model(self, output: Any, tokens: Tensor | None) -> Weighed:
        loss, own = _first_scalar(output), self._own
        if own is None:
            return Weighed(loss=loss, kind="mean")
        kind = self._own_kind(tokens)
        if kind.name == "counted":
            return Weighed(loss=loss, kind="counted", count=kind.count, positions=own.positions)
        if kind.name not in ("mean", "sum", "fixed") and self._settled is None:
            self._settled = kind.name
            self._warn(
                "it is not known over what the model's loss is a mean, so micro-batches weigh by their samples; "
                "have it return its output and give a loss_fn that returns (sum, count)"
            )
        return Weighed(loss=loss, kind="sum" if kind.name == "sum" else "mean")

    def _own_kind(self, tokens: Tensor | None) -> LossKind:
        assert self._own is not None
        if self._own.kind != "counted":
            return LossKind(self._own.kind)
        return LossKind("unknown") if tokens is None else counted(tokens)

    def _warn(self, text: str) -> None:
        if self._warns:
            warnings.warn(text, stacklevel=4)


def _called(function: LossFunction, output: Any, target: Any) -> Any:
    """The function's loss; one that cannot take all that the model returns is refused with what to do."""
    try:
        return function(output, target)
    except (AttributeError, TypeError) as error:
        if isinstance(output, Tensor):
            raise
        raise BaPipeError(
            f"the loss function cannot take what the model returns, a {type(output).__name__} "
            f"({type(error).__name__}: {first_line(error)}); let it take the part that it needs, such as output[0]"
        ) from error


def _positions(target: Any) -> float:
    """Entries per sample of the largest tensor of a target."""
    leaves = [leaf for leaf in flatten(target)[0] if isinstance(leaf, Tensor) and leaf.ndim and leaf.numel()]
    return max((leaf.numel() / leaf.shape[0] for leaf in leaves), default=1.0)


def _scalar(loss: object) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise BaPipeError(
            "the loss must be one number, a mean or a sum, or (sum, count); got "
            f"{type(loss).__name__}{f' of shape {tuple(loss.shape)}' if isinstance(loss, Tensor) else ''}"
        )
    return loss.reshape(())


def _first_scalar(output: Any) -> Tensor:
    for leaf in flatten(output)[0]:
        if isinstance(leaf, Tensor) and leaf.ndim == 0 and leaf.is_floating_point():
            return leaf
    raise BaPipeError(NO_LOSS)
