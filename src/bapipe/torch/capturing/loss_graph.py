"""The loss that a captured model returns itself: how it follows from its micro-batches' (see `loss_kinds`).

The graph is walked back from the first scalar that the model returns. Where that is a mean over labels or over a
mask, the last stage returns what it was divided by, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from bapipe.torch.capturing.linearise import Program
from bapipe.torch.capturing.loss_kinds import (
    FIXED,
    MEAN,
    NEGLIGIBLE,
    SIZE,
    UNKNOWN,
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
from bapipe.torch.capturing.part_ops import join_loss
from bapipe.torch.capturing.stage_graph import StageGraph
from bapipe.torch.capturing.torch_internals import argument_names, is_symbolic, op_name, size_at, symbols

__all__ = ["NO_LOSS", "OwnLoss", "count_nodes", "own_loss"]

_LABELS = frozenset(("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"))
_ELEMENTS = frozenset(
    [
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "cosine_embedding_loss",
        "hinge_embedding_loss",
        "huber_loss",
        "kl_div",
        "l1_loss",
        "margin_ranking_loss",
        "mse_loss",
        "multi_margin_loss",
        "multilabel_margin_loss",
        "poisson_nll_loss",
        "smooth_l1_loss",
        "soft_margin_loss",
        "triplet_margin_loss",
    ]
)
_CLAMPING = frozenset(("clamp", "clamp_min", "maximum"))
_REDUCED = {0: "none", 1: "mean", 2: "sum"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnLoss:
    """The first scalar among a model's outputs."""

    leaf: int
    """its place among the leaves of the output"""
    kind: str
    """mean, counted, sum, fixed or unknown"""
    positions: float = 1.0
    """of a counted mean: what is counted at most, per sample"""
    dividing: tuple[fx.Node, ...] = ()
    """of a counted mean: the nodes that divide by the count"""
    count: fx.Node | None = None
    """of a counted mean: the count, where it is a value of the graph"""


NO_LOSS = (
    "the model's output holds no scalar to train on; give a loss_fn(output, target), for bapipe run and auto a "
    "function `loss` beside the model's"
)
"""what to do about a model that does not return its loss"""


def own_loss(program: Program) -> OwnLoss | None:
    """What the model returns as its loss, if it returns a scalar. Linear in the nodes that lead to it."""
    for leaf, node in enumerate(program.outputs):
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point():
            walk = _Walk(program)
            kind = walk.kind(node)
            if kind.name != "counted":
                return OwnLoss(leaf=leaf, kind=kind.name)
            dividing, of, is_value = walk.counts[kind.count]
            return OwnLoss(
                leaf=leaf,
                kind=kind.name,
                positions=max(1.0, _elements(of, program.batch) / program.batch),
                dividing=tuple(dividing),
                count=of if is_value else None,
            )
    return None


def count_nodes(build: StageGraph, found: OwnLoss) -> fx.Node | None:
    """Add the count of a counted mean to a stage's graph, and divide by 1 where it is 0.

    None where the stage does not have what it is made of: the loss is computed on an earlier one.
    """
    count: fx.Node | None = None
    if found.count is not None:
        count = build.env.get(found.count)
        if not isinstance(count, fx.Node):
            return None
    divisions = [build.env.get(node) for node in found.dividing]
    for source, node in zip(found.dividing, divisions, strict=True):
        if not isinstance(node, fx.Node) or node.target not in (source.target, join_loss):
            return None
    for source, node in zip(found.dividing, divisions, strict=True):
        assert isinstance(node, fx.Node)
        with build.graph.inserting_before(node):
            if found.count is not None:
                made = build.graph.call_function(ratio, (node.args[0], node.args[1]))
            elif node.target is join_loss:  # of a layer that is divided between stages
                count = count or build.graph.call_function(label_count, (node.args[1], None, node.args[4]))
                continue
            else:
                given = _arguments(node)
                labels = (given["target"], given.get("weight"), given.get("ignore_index", -100))
                count = count or build.graph.call_function(label_count, labels)
                made = build.graph.call_function(
                    mean_over_labels,
                    (given["self"], *labels, given.get("label_smoothing", 0.0), count),
                    {"log_probabilities": _name(source) != "cross_entropy_loss"},
                )
        node.replace_all_uses_with(made)
        build.graph.erase_node(node)
        build.env[source] = made
    return count


class _Walk:
    """From a scalar back to what it is made of."""

    def __init__(self, program: Program) -> None:
        self.counts: dict[Any, tuple[list[fx.Node], fx.Node, bool]] = {}
        """key of a count -> who divides by it, whose elements are counted, and whether that is the count itself"""
        self._program = program
        self._known: dict[fx.Node, LossKind] = {}

    def kind(self, value: Any) -> LossKind:
        if not isinstance(value, fx.Node):
            return FIXED
        needed, waiting = {value}, [value]
        while waiting:
            node = waiting.pop()
            if self._at_once(node) is None:
                waiting.extend(item for item in node.all_input_nodes if item not in needed)
                needed.update(node.all_input_nodes)
        for node in self._program.graph.nodes:
            if node in needed:
                self._known[node] = self._found(node)
        return self._known[value]

    def _at_once(self, node: fx.Node) -> LossKind | None:
        """The kind of what need not be looked into."""
        program, value = self._program, node.meta.get("val")
        kind = program.kinds.get(node)
        if kind in ("parameter", "buffer", "constant"):
            return FIXED
        if isinstance(value, (torch.SymInt, int, float, torch.SymFloat)) and not isinstance(value, bool):
            return self._number(value)
        if not isinstance(value, Tensor):
            return UNKNOWN
        if any(str(symbol).startswith("u") for size in value.shape for symbol in symbols(size)):
            return UNKNOWN  # as many entries as the data has
        if self._has_samples(value):
            return FIXED if kind == "input" and not self._moves(value) else rows(first=self._first(value))
        if kind == "input":
            return FIXED
        if node in program.calls or kind == "region" or node.op != "call_function":
            return UNKNOWN
        return None

    def _number(self, value: Any) -> LossKind:
        if not is_symbolic(value):
            return FIXED
        return SIZE if size_at(value, 6) == 2 * size_at(value, 3) else UNKNOWN

    def _moves(self, value: Tensor) -> bool:
        return not self._program.dynamic or any(is_symbolic(size) for size in value.shape)

    def _has_samples(self, value: Tensor) -> bool:
        if self._program.dynamic:
            return any(is_symbolic(size) for size in value.shape)
        return value.ndim > 0 and int(value.shape[0]) % self._program.batch == 0

    def _first(self, value: Tensor) -> bool:
        return not self._program.dynamic or is_symbolic(value.shape[0])

    def _found(self, node: fx.Node) -> LossKind:
        at_once = self._at_once(node)
        if at_once is not None:
            return at_once
        name, given = _name(node), _arguments(node)
        args = list(given.values())
        kinds = [self._known[item] if isinstance(item, fx.Node) else FIXED for item in args]
        first = kinds[0] if kinds else FIXED
        if name in _LABELS or name in _ELEMENTS:
            return self._loss(node, name, given)
        if name in ("mean", "sum"):
            if first.name != "rows":
                return first
            return MEAN if name == "mean" else summed(node)
        if name in ("add", "sub", "rsub"):
            small = any(isinstance(item, (int, float)) and abs(item) <= NEGLIGIBLE for item in args[:2])
            return self._counting(node, added(first, kinds[1], negligible=small))
        if name == "mul":
            return self._counting(node, multiplied(first, kinds[1]))
        if name == "div" and given.get("rounding_mode") is None:
            return self._quotient(node, first, kinds[1])
        if name in _CLAMPING and first.name == "sum":
            return first
        if any(kind.name == "rows" for kind in kinds):
            return UNKNOWN
        return combined(name, (self._known[item] for item in node.all_input_nodes))

    def _counting(self, node: fx.Node, kind: LossKind) -> LossKind:
        return summed(node) if kind.name == "sum" and kind.count is None else kind

    def _quotient(self, node: fx.Node, one: LossKind, two: LossKind) -> LossKind:
        number = node.args[1]
        whole = not self._program.dynamic and isinstance(number, (int, float)) and number > 1
        if one.name == "sum" and whole and float(number) % self._program.batch == 0:  # type: ignore[arg-type]
            return UNKNOWN  # a trace of one batch size has sizes as numbers
        kind = divided(one, two)
        if kind.name == "counted" and one.name == "sum" and isinstance(kind.count, fx.Node):
            key = ("value", kind.count)
            dividing, *_ = self.counts.setdefault(key, ([], kind.count, True))
            dividing.append(node)
            return counted(key)
        return kind

    def _loss(self, node: fx.Node, name: str, given: Mapping[str, Any]) -> LossKind:
        reduction = _REDUCED.get(given.get("reduction", 1))
        target = given.get("target")
        value = target.meta.get("val") if isinstance(target, fx.Node) else None
        if reduction == "sum":
            return summed(node)
        if reduction != "mean":
            return UNKNOWN
        source = given.get("self", given.get("input", given.get("input1")))
        made = source.meta.get("val") if isinstance(source, fx.Node) else None
        if not isinstance(made, Tensor) or not self._has_samples(made):
            return UNKNOWN
        if name in _ELEMENTS or not isinstance(value, Tensor) or value.is_floating_point():
            weighted = name in ("mse_loss", "huber_loss", "l1_loss") and given.get("weight") is not None
            return UNKNOWN if weighted else MEAN
        assert isinstance(target, fx.Node)
        key = ("labels", target, given.get("weight"), given.get("ignore_index", -100))
        dividing, *_ = self.counts.setdefault(key, ([], target, False))
        dividing.append(node)
        return counted(key)


def _name(node: fx.Node) -> str:
    return op_name(node.target).removeprefix("aten.").removesuffix("_")


def _arguments(node: fx.Node) -> dict[str, Any]:
    names = argument_names(node.target)
    if not names:
        return {str(index): item for index, item in enumerate(node.args)} | dict(node.kwargs)
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _elements(node: fx.Node, batch: int) -> float:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return 1.0
    total = 1.0
    for size in value.shape:
        total *= size_at(size, batch)
    return total
