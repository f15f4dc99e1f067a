"""How the loss of a batch follows from those of its parts, and how arithmetic changes that.

A number that is computed from a batch is one of these, where parts i have nᵢ of N samples:

    mean      L = Σ nᵢ/N · Lᵢ              a mean over samples
    counted   L = Σ cᵢ·Lᵢ / Σ cᵢ           a mean over what is counted: tokens that are not masked, class weights
    sum       L = Σ Lᵢ
    fixed     L = Lᵢ                       does not depend on the samples
    zero      0, whatever the samples
    size      a number that grows with the samples, such as a batch's first dimension
    rows      a tensor with entries of each sample by itself
    unknown   anything else: a product of means, a sum of means with different counts
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = [
    "FIXED",
    "KEEPING",
    "MEAN",
    "NEGLIGIBLE",
    "SIZE",
    "UNKNOWN",
    "ZERO",
    "LossKind",
    "added",
    "combined",
    "counted",
    "divided",
    "label_count",
    "mean_over_labels",
    "multiplied",
    "ratio",
    "rows",
    "summed",
]


@dataclass(frozen=True, slots=True, eq=False)
class LossKind:
    """What a number or tensor is."""

    name: str
    count: Any = None
    """of a sum: itself, before anything kept it from being 0; of a counted mean: what it was divided by"""
    first: bool = False
    """of rows: whether samples are counted by the first dimension"""
    ragged: bool = False
    """of rows: whether how many there are depends on the data"""

    def is_like(self, other: LossKind) -> bool:
        """Whether both follow from their parts in the same way. Counts are the same object, or equal keys."""
        if self.name != other.name or self.name != "counted" or self.count is other.count:
            return self.name == other.name
        return isinstance(self.count, tuple) and isinstance(other.count, tuple) and self.count == other.count


FIXED, MEAN, SIZE = LossKind("fixed"), LossKind("mean"), LossKind("size")
UNKNOWN, ZERO = LossKind("unknown"), LossKind("zero")

NEGLIGIBLE = 1e-4
"""a number so small that is added to a sum only keeps it from being 0"""

KEEPING = frozenset(
    [
        "alias",
        "clone",
        "contiguous",
        "cpu",
        "cuda",
        "detach",
        "double",
        "expand",
        "flatten",
        "float",
        "half",
        "lift_fresh_copy",
        "reshape",
        "squeeze",
        "to",
        "type",
        "type_as",
        "unsqueeze",
        "view",
        "_to_copy",
    ]
)
"""functions that change neither what a number is nor, much, how it is laid out"""


def rows(*, first: bool, ragged: bool = False) -> LossKind:
    """A tensor with entries of each sample."""
    return LossKind("rows", first=first, ragged=ragged)


def summed(count: Any) -> LossKind:
    """A sum over samples, which may become the count of a mean."""
    return LossKind("sum", count=count)


def counted(count: Any) -> LossKind:
    """A mean over what is counted."""
    return LossKind("counted", count=count)


def added(one: LossKind, two: LossKind, *, negligible: bool = False) -> LossKind:
    """The kind of a sum of two; `negligible`: one is a number that at most keeps the other from being 0."""
    if "unknown" in (one.name, two.name) or "size" in (one.name, two.name):
        return UNKNOWN
    for this, other in ((one, two), (two, one)):
        if this.name == "zero" or (this.name == "fixed" and (other.name != "sum" or negligible)):
            return other
        if this.name == "fixed":
            return UNKNOWN
    if not one.is_like(two):
        return UNKNOWN
    if one.name == "rows":
        return rows(first=one.first and two.first, ragged=one.ragged or two.ragged)
    return summed(None) if one.name == "sum" else one


def multiplied(one: LossKind, two: LossKind) -> LossKind:
    """The kind of a product of two."""
    if "zero" in (one.name, two.name):
        return ZERO
    for this, other in ((one, two), (two, one)):
        if this.name == "fixed":
            return other
        if this.name == "size" and other.name == "mean":
            return summed(None)
    if one.name == two.name == "rows":
        return added(one, two)
    return UNKNOWN


def divided(one: LossKind, two: LossKind) -> LossKind:
    """The kind of a quotient of two."""
    if two.name == "fixed":
        return multiplied(one, two)
    if one.name == two.name == "rows":
        return added(one, two)
    if one.name == "sum" and two.name == "size":
        return MEAN
    if one.name == two.name == "sum" and two.count is not None:
        return counted(two.count)
    return UNKNOWN


def combined(name: str, kinds: Iterable[LossKind]) -> LossKind:
    """The kind of what any other function makes of values that are not rows alone: linear ones keep it."""
    found = [kind for kind in kinds if kind.name != "fixed"]
    if not found:
        return FIXED
    if name in KEEPING or name == "neg":
        return found[0]
    if name in ("stack", "cat") and all(kind.is_like(found[0]) for kind in found):
        return found[0]
    return UNKNOWN


def label_count(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """What cross entropy divides its sum by: labels that are not ignored, or the sum of their class weights."""
    kept = target != ignore_index
    if weight is None:
        return kept.sum()
    return weight[target.masked_fill(~kept, 0)].masked_fill(~kept, 0).sum()


def ratio(total: Tensor, count: Tensor | float) -> Tensor:
    """A mean; 0, also in its gradients, where nothing was counted."""
    if not isinstance(count, Tensor):
        return total / (count or 1)
    return total / count.masked_fill(count == 0, 1).to(total.dtype)


def mean_over_labels(
    given: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    count: Tensor,
    *,
    log_probabilities: bool = False,
) -> Tensor:
    """Cross entropy (of log-probabilities: nll_loss) over `count` labels; 0 where all are ignored."""
    if given.dtype == torch.float16:  # which cannot hold a sum of many
        given, weight = given.float(), None if weight is None else weight.float()
    if log_probabilities:
        total = functional.nll_loss(given, target, weight, ignore_index=ignore_index, reduction="sum")
    else:
        total = functional.cross_entropy(
            given, target, weight, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing
        )
    return ratio(total, count)
