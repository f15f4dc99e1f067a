"""The graph of a layer's backward as two: input gradients now, weight gradients later.

    saved, output gradients ->  dI  -> input gradients, cheap weight gradients, what dW needs of it
                      what is held  ->  dW  -> the other weight gradients

A weight's gradient is deferred if it takes a product that the input gradients do not. What is held in between is
the smallest set of values (a minimum cut) from which dW can be had: values that are cheap to make, such as a cast,
are made again in dW from smaller ones.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from bapipe.torch.capturing.torch_internals import op_name

__all__ = ["SplitGraphs", "split_backward_graph"]

_PRODUCTS = frozenset(
    f"aten.{name}"
    for name in (
        "_unsafe_masked_index_put_accumulate",
        "addbmm",
        "addmm",
        "baddbmm",
        "bmm",
        "convolution",
        "convolution_backward",
        "embedding_dense_backward",
        "index_put",
        "mm",
        "scatter_add",
    )
)
"""operations whose time is worth deferring"""
_CHEAP = frozenset(
    f"aten.{name}"
    for name in (
        "_to_copy",
        "_unsafe_view",
        "alias",
        "as_strided",
        "cat",
        "clone",
        "expand",
        "full",
        "full_like",
        "permute",
        "reshape",
        "scalar_tensor",
        "select",
        "slice",
        "squeeze",
        "t",
        "transpose",
        "unsqueeze",
        "view",
    )
) | {"prims.convert_element_type", "prims.iota"}
"""besides what works entry by entry"""
_SCALE = 8
"""a value that dI makes costs one in so many more than a saved one of its size, which is there already"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitGraphs:
    """Both parts of a backward, not yet compiled."""

    input_graph: fx.GraphModule | None
    """takes all that the backward takes; None: nothing is to do at once"""
    at_once: tuple[int, ...]
    """which of the backward's results it returns, in this order"""
    made: int
    """how many values it returns after these, to be held"""
    weight_graph: fx.GraphModule | None
    """takes the values of `kept`, then what is `made`; None: nothing is deferred"""
    weight_examples: tuple[Any, ...]
    """one per input of it"""
    kept: tuple[int, ...]
    """which of the backward's inputs are held"""
    deferred: tuple[int, ...]
    """which of the backward's results it returns, in this order"""


def split_backward_graph(
    module: fx.GraphModule, examples: Sequence[Any], *, weights: int, resident: Collection[str]
) -> SplitGraphs:
    """Split a backward whose first `weights` results are gradients of weights; `resident` names inputs that are
    held anyway, such as the weights themselves."""
    module = fx.GraphModule(module, copy.deepcopy(module.graph))
    _split_convolutions(module)
    nodes = list(module.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    outputs: list[Any] = list(next(node for node in nodes if node.op == "output").args[0])
    received = _ancestors(item for item in outputs[weights:] if isinstance(item, fx.Node))
    deferred = tuple(
        index
        for index, item in enumerate(outputs[:weights])
        if isinstance(item, fx.Node)
        and any(op_name(node.target) in _PRODUCTS for node in _ancestors([item]) - received)
    )
    at_once = tuple(
        index for index, item in enumerate(outputs) if index not in deferred and isinstance(item, fx.Node)
    )
    now = _ancestors(outputs[index] for index in at_once)
    later = _ancestors(outputs[index] for index in deferred) - now - set(inputs)
    # Of what dI computes as a tuple, dI takes the items: a tuple cannot be held.
    items = {node for node in later if node.target is operator.getitem and node.args[0] in now}
    now, later = now | items, later - items
    held = _smallest_cut(later, resident)
    needed = _needed(later, held)
    kept = tuple(index for index, node in enumerate(inputs) if node in held)
    made = [node for node in nodes if node in held and node.op != "placeholder"]
    input_graph = weight_graph = None
    if now - set(inputs):
        input_graph = _part(module, inputs, now, [*(outputs[index] for index in at_once), *made])
    if deferred:
        given = [*(inputs[index] for index in kept), *made]
        weight_graph = _part(module, given, needed, [outputs[index] for index in deferred])
    values = dict(zip(inputs, examples, strict=True))
    return SplitGraphs(
        input_graph=input_graph,
        at_once=at_once if input_graph is not None else (),
        made=len(made),
        weight_graph=weight_graph,
        weight_examples=(*(values[inputs[index]] for index in kept), *(node.meta["val"] for node in made)),
        kept=kept,
        deferred=deferred,
    )


def _ancestors(ends: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that these are computed from, themselves included."""
    found: set[fx.Node] = set()
    waiting = list(ends)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def _split_convolutions(module: fx.GraphModule) -> None:
    """A convolution's backward makes three gradients in one node: have one for the input's, one for the others."""
    graph = module.graph
    for node in list(graph.nodes):
        if op_name(node.target) != "aten.convolution_backward":
            continue
        mask = list(node.args[-1])
        items = {user.args[1]: user for user in node.users}
        if not mask[0] or not any(mask[1:]) or 0 not in items:
            continue
        with graph.inserting_after(node):
            first = graph.call_function(node.target, (*node.args[:-1], [True, False, False]), node.kwargs)
        value = node.meta["val"]
        first.meta = {**node.meta, "val": (value[0], None, None)}
        items[0].replace_input_with(node, first)
        node.args = (*node.args[:-1], [False, *mask[1:]])
        node.meta["val"] = (None, *value[1:])
    module.recompile()


def _cheap(node: fx.Node) -> bool:
    """Whether it may be computed again in dW."""
    if node.op == "get_attr":
        return True
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    return torch.Tag.pointwise in getattr(node.target, "tags", ()) or op_name(node.target) in _CHEAP


def _smallest_cut(later: set[fx.Node], resident: Collection[str]) -> set[fx.Node]:
    """The values to hold, fewest bytes in all, from which the `later` nodes can be computed."""
    import networkx

    flow: Any = networkx.DiGraph()
    flow.add_nodes_from(("source", "sink"))
    waiting = [given for node in later for given in node.all_input_nodes if given not in later]
    for node in waiting:
        flow.add_edge((node, "made"), "sink")
    seen: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        price = _price(node, resident)
        if price is None:  # it cannot be held, as a tuple cannot
            flow.add_edge((node, "asked"), (node, "made"))
        else:
            flow.add_edge((node, "asked"), (node, "made"), capacity=price)
        if not _cheap(node):
            flow.add_edge("source", (node, "asked"))
            continue
        for item in node.all_input_nodes:
            flow.add_edge((item, "made"), (node, "asked"))
            waiting.append(item)
    _, (before, _) = networkx.minimum_cut(flow, "source", "sink")
    return {node for node in seen if (node, "asked") in before and (node, "made") not in before}


def _price(node: fx.Node, resident: Collection[str]) -> int | None:
    value = node.meta.get("val")
    if node.name in resident:
        return 0
    if isinstance(value, Tensor):
        size = math.prod(value.shape) * value.element_size() * _SCALE
        return size if node.op == "placeholder" else size + size // _SCALE + 1
    return 0 if isinstance(value, (int, float)) else None


def _needed(later: set[fx.Node], held: set[fx.Node]) -> set[fx.Node]:
    """The nodes of dW: the later ones, and those between them and what is held."""
    found = set(later)
    waiting = [item for node in later for item in node.all_input_nodes]
    while waiting:
        node = waiting.pop()
        if node not in found and node not in held:
            found.add(node)
            waiting.extend(node.all_input_nodes)
    return found


def _part(
    module: fx.GraphModule, inputs: Sequence[fx.Node], inside: set[fx.Node], outputs: Sequence[fx.Node]
) -> fx.GraphModule:
    """A graph of some of the nodes; the outputs keep their strides."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in module.graph.nodes:
        if node in inside and node not in copies:
            copies[node] = graph.node_copy(node, lambda item: copies[item])
    end = graph.output(tuple(copies[node] for node in outputs))
    end.meta["user_visible_output_idxs"] = list(range(len(outputs)))
    return fx.GraphModule(module, graph)
