"""What a loss function computes, from the torch functions that it calls.

A torch function mode sees `F.cross_entropy(…)`, `x.mean()` and `a + b` as they are called, and notes the kind of
what each makes (see `loss_kinds`). Cross entropy's mean is made from its sum and its count, so that a batch
without a single label gives 0 and not 0/0.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from bapipe.torch.capturing.loss_kinds import (
    FIXED,
    MEAN,
    NEGLIGIBLE,
    SIZE,
    UNKNOWN,
    ZERO,
    LossKind,
    added,
    combined,
    counted,
    divided,
    label_count,
    mean_over_labels,
    multiplied,
    ratio,
    rows,
    summed,
)
from bapipe.torch.capturing.torch_internals import flatten

__all__ = ["LossWatch"]

_LABELS = {functional.cross_entropy, functional.nll_loss}
_ELEMENTS = {
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.cosine_embedding_loss,
    functional.gaussian_nll_loss,
    functional.hinge_embedding_loss,
    functional.huber_loss,
    functional.kl_div,
    functional.l1_loss,
    functional.margin_ranking_loss,
    functional.mse_loss,
    functional.multi_margin_loss,
    functional.multilabel_margin_loss,
    functional.multilabel_soft_margin_loss,
    functional.poisson_nll_loss,
    functional.smooth_l1_loss,
    functional.soft_margin_loss,
    functional.triplet_margin_loss,
    functional.triplet_margin_with_distance_loss,
}
"""losses that are means of what they are given, entry by entry or row by row"""
_WEIGHTED_MEANS = {functional.mse_loss, functional.huber_loss, functional.l1_loss, functional.smooth_l1_loss}
"""whose mean is divided by the sum of the weights, if they are given any"""
_SELECTING = frozenset(("masked_select", "nonzero", "argwhere", "unique", "unique_consecutive"))
_MIXING = frozenset(("matmul", "mm", "einsum", "cdist", "inner", "tensordot", "pdist", "corrcoef", "cov", "outer"))
_MOVING = frozenset(("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "T", "mT", "H"))
_NUMBERS = frozenset(("item", "__float__", "__int__", "__index__", "tolist", "numpy", "__array__"))
_CLAMPING = frozenset(("clamp", "clamp_min", "clip", "maximum"))
_ACROSS = frozenset(
    ("softmax", "log_softmax", "cumsum", "logsumexp", "std", "var", "norm", "sort", "diff", "prod")
)
_OPERATORS = {
    "add": "add",
    "iadd": "add",
    "imul": "mul",
    "isub": "sub",
    "itruediv": "div",
    "matmul": "matmul",
    "mul": "mul",
    "neg": "neg",
    "radd": "add",
    "rmatmul": "matmul",
    "rmul": "mul",
    "rsub": "rsub",
    "sub": "sub",
    "truediv": "div",
}


class LossWatch(TorchFunctionMode):
    """Watches one call of a loss function on `size` samples; `kind_of` then says what its result is."""

    def __init__(self, output: Any, target: Any, size: int, scalars: Mapping[int, LossKind] | None = None) -> None:
        """`scalars` has kinds of leaves of the output that are scalars; the rest of them is unknown."""
        super().__init__()
        self._size = size
        self._known: dict[int, tuple[Tensor, LossKind]] = {}
        self._numbers: dict[float, LossKind] = {}
        """numbers that were read off tensors, and so are no constants"""
        self._plain: set[float] = set()
        """sizes that do not grow with the samples"""
        self._counts: dict[tuple[int, int, int], tuple[Tensor, Tensor, Tensor | None]] = {}
        """by target, class weights and ignored label: the count, and what it is of, whose ids stay taken"""
        for index, leaf in enumerate(flatten(output)[0]):
            if isinstance(leaf, Tensor):
                self._set(leaf, (scalars or {}).get(index, UNKNOWN) if leaf.ndim == 0 else self._leaf(leaf))
        for leaf in flatten(target)[0]:
            if isinstance(leaf, Tensor):
                self._set(leaf, self._leaf(leaf) if leaf.ndim else FIXED)

    def _leaf(self, leaf: Tensor) -> LossKind:
        return rows(first=leaf.shape[0] == self._size)

    def kind_of(self, value: Any) -> LossKind:
        """Of a tensor or number that the function had or returned."""
        if isinstance(value, Tensor):
            known = self._known.get(id(value))
            if known is not None:
                return known[1]
            # What has a history and was not seen comes from code that is no torch function.
            return FIXED if value.grad_fn is None else UNKNOWN
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return self._numbers.get(float(value), FIXED)
        return FIXED

    def _set(self, value: Tensor, kind: LossKind) -> None:
        if kind.name == "sum" and kind.count is None:
            kind = summed(value)
        self._known[id(value)] = (value, kind)

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LABELS:
            return self._labels(func, args, kwargs)
        name = _name(func)
        if name in ("div", "true_divide", "divide") and len(args) == 2 and not kwargs:
            made = self._divide(func, args[0], args[1])
        elif self._is_empty(args) and name == "mean" and len(args) == 1 and not kwargs:
            made = args[0].sum()
        elif self._is_empty(args) and func in _ELEMENTS and kwargs.get("reduction", "mean") == "mean":
            made = func(*args, **{**kwargs, "reduction": "sum"})
        else:
            made = func(*args, **kwargs)
        if isinstance(made, Tensor):
            self._set(made, self._kind(func, name, args, kwargs, made))
        elif isinstance(made, (tuple, list)) and any(isinstance(item, Tensor) for item in made):
            for item in made:
                if isinstance(item, Tensor):
                    self._set(item, self._other(name, args, kwargs, item))
        elif name in _NUMBERS:
            self._read(args[0], made)
        elif name == "__setitem__":
            self._set(args[0], self._other(name, (args[0], *args[2:]), {}, args[0]))
        elif name in ("shape", "size", "numel", "__len__", "nelement"):
            self._looked_at(args[0])
        return made

    def _is_empty(self, args: Sequence[Any]) -> bool:
        """Whether a mask has picked nothing, so that a mean is 0/0 where its sum is 0."""
        return bool(args) and isinstance(args[0], Tensor) and self.kind_of(args[0]).ragged and not args[0].numel()

    def _divide(self, func: Callable[..., Any], total: Any, count: Any) -> Any:
        """A quotient; of two sums it is 0 where there is nothing to divide by."""
        if divided(self.kind_of(total), self.kind_of(count)).name == "counted" and not func.__name__.endswith("_"):
            return ratio(total, count)
        return func(total, count)

    def _kind(
        self, func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any], made: Tensor
    ) -> LossKind:
        first = self.kind_of(args[0]) if args else FIXED
        if func in _ELEMENTS:
            return self._elements(func, args, kwargs)
        if func is functional.ctc_loss:
            return _reduced(_bound(func, args, kwargs), MEAN, rows(first=True))
        if name in ("mean", "sum"):
            return self._reduction(name, args, kwargs, first)
        if name in ("add", "sub", "rsub") and len(args) > 1:
            numbers = [item for item in args[:2] if isinstance(item, (int, float))]
            small = any(abs(item) <= NEGLIGIBLE for item in numbers)
            return added(first, self.kind_of(args[1]), negligible=small)
        if name in ("mul", "multiply") and len(args) > 1:
            zero = any(isinstance(item, (int, float)) and item == 0 for item in args[:2])
            return ZERO if zero else multiplied(first, self.kind_of(args[1]))
        if name in ("div", "true_divide", "divide") and len(args) > 1 and not kwargs.get("rounding_mode"):
            return self._quotient(first, args[1])
        if name in _CLAMPING and first.name == "sum" and all(not isinstance(item, Tensor) for item in args[1:]):
            return first
        return self._other(name, args, kwargs, made)

    def _quotient(self, one: LossKind, by: Any) -> LossKind:
        two = self.kind_of(by)
        number = float(by) if isinstance(by, (int, float)) else 0.0
        if one.name == "sum" and number:
            looked = bool(self._numbers or self._plain)
            if two.name == "size" and number in self._plain:
                return UNKNOWN
            if two.name == "fixed" and looked and number > 1 and number % self._size == 0 and self._size > 1:
                return UNKNOWN  # perhaps a product of sizes
        return divided(one, two)

    def _reduction(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], kind: LossKind) -> LossKind:
        if kind.name != "rows":
            return kind
        value: Tensor = args[0]
        where = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
        if isinstance(where, torch.dtype):
            where = None
        if where is not None and where != () and where != []:
            dims = [where] if isinstance(where, int) else list(where)
            if not kind.first:
                return UNKNOWN
            if all(dim % value.ndim for dim in dims):
                return kind
        if name == "sum":
            return summed(None)
        if kind.ragged:
            return counted(value.numel() if where is None else value.shape[0])
        return MEAN if value.numel() % self._size == 0 else UNKNOWN

    def _labels(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        """Cross entropy, also of log-probabilities (nll_loss)."""
        given = _bound(func, args, kwargs)
        target = given["target"]
        plain = given.get("size_average") is None and given.get("reduce") is None
        if not plain or given["reduction"] != "mean" or target.is_floating_point():
            made: Tensor = func(*args, **kwargs)
            kind = _reduced(given, MEAN, rows(first=True, ragged=self.kind_of(target).ragged))
            self._set(made, kind if plain else UNKNOWN)
            return made
        weight, ignored = given["weight"], given["ignore_index"]
        key = (id(target), id(weight), ignored)
        count, *_ = self._counts.setdefault(key, (label_count(target, weight, ignored), target, weight))
        made = mean_over_labels(
            given["input"],
            target,
            weight,
            ignored,
            given.get("label_smoothing", 0.0),
            count,
            log_probabilities=func is functional.nll_loss,
        )
        unfit = self.kind_of(given["input"]).name == "unknown" or self.kind_of(target).name != "rows"
        self._set(made, UNKNOWN if unfit else counted(count))
        return made

    def _elements(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> LossKind:
        given = _bound(func, args, kwargs)
        tensors = [item for item in given.values() if isinstance(item, Tensor)]
        kinds = [kind for kind in map(self.kind_of, tensors) if kind.name != "fixed"]
        legacy = given.get("size_average") is not None or given.get("reduce") is not None
        weighted = func in _WEIGHTED_MEANS and given.get("weight") is not None
        if legacy or weighted or any(kind.name != "rows" for kind in kinds):
            return UNKNOWN
        if not kinds:
            return FIXED
        ragged = any(kind.ragged for kind in kinds)
        mean = counted(tensors[0].shape[0]) if ragged else MEAN
        return _reduced(given, mean, rows(first=all(kind.first for kind in kinds), ragged=ragged))

    def _other(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], made: Tensor) -> LossKind:
        """Any other function: of rows it makes rows, unless it mixes them."""
        given = [item for item in flatten((list(args), dict(kwargs)))[0] if isinstance(item, Tensor)]
        kinds = [self.kind_of(item) for item in given]
        found = [kind for kind in kinds if kind.name != "fixed"]
        if not found or any(kind.name != "rows" for kind in found):
            return combined(name, kinds)
        index = args[1] if name == "__getitem__" and len(args) > 1 else None
        picks = any(isinstance(item, Tensor) and item.dtype == torch.bool for item in _items(index))
        ragged = picks or name in _SELECTING or any(kind.ragged for kind in found)
        mixes = name in _MIXING and len(found) > 1 and all(item.ndim <= 2 for item in given)
        dim = kwargs.get("dim", args[1] if len(args) > 1 and isinstance(args[1], int) else None)
        across = name in _ACROSS and isinstance(dim, int) and (not found[0].first or dim % given[0].ndim == 0)
        if mixes or across or (made.ndim == 0 and given[0].ndim > 0):
            return UNKNOWN
        first = all(kind.first for kind in found) and name not in _MOVING
        if not ragged and made.ndim and made.shape[0] % self._size:
            first = False
        return rows(first=first, ragged=ragged)

    def _read(self, tensor: Tensor, number: Any) -> None:
        kind = self.kind_of(tensor)
        if kind.name != "fixed" and isinstance(number, (int, float)):
            self._numbers[float(number)] = UNKNOWN if kind.name == "rows" else kind
            if number == 0:
                self._numbers[1.0] = self._numbers[0.0]  # as max(number, 1)

    def _looked_at(self, tensor: Tensor) -> None:
        kind = self.kind_of(tensor)
        if kind.name != "rows":
            self._plain.update(map(float, tensor.shape))
            return
        sizes = (
            [math.prod(tensor.shape[: dim + 1]) for dim in range(tensor.ndim)] if kind.first or kind.ragged else []
        )
        self._plain.update(float(size) for size in tensor.shape[1:])
        for number in {*sizes, tensor.numel()}:
            self._numbers[float(number)] = summed(float(number)) if kind.ragged else SIZE


def _name(func: Callable[..., Any]) -> str:
    """`add` for add, add_, __add__ and aten's add.Tensor; `shape` for what gets an attribute."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return str(getattr(getattr(func, "__self__", None), "__name__", ""))
    name = name.partition(".")[0]
    if name.startswith("__"):
        return _OPERATORS.get(name.strip("_"), name)
    return name.removesuffix("_")


def _bound(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _reduced(given: Mapping[str, Any], mean: LossKind, each: LossKind) -> LossKind:
    if given["reduction"] in ("mean", "batchmean"):
        return mean
    return summed(None) if given["reduction"] == "sum" else each


def _items(index: Any) -> Sequence[Any]:
    return index if isinstance(index, (tuple, list)) else (index,)
