"""Who writes what: storages that traced nodes share, write in place and draw random numbers for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx

from bapipe.torch.capturing.leaf_modules import OPAQUE_OP
from bapipe.torch.capturing.torch_internals import op_name, operator_use

__all__ = ["Storages", "draws_random", "input_nodes", "region_of", "storages"]

Bases = frozenset[fx.Node]


class Storages:
    """Of each node the nodes whose storage its value may be part of, and which storages each node writes."""

    def __init__(self) -> None:
        self.bases: dict[fx.Node, Bases] = {}
        self.writes: dict[fx.Node, Bases] = {}

    @property
    def written(self) -> Bases:
        return frozenset(base for bases in self.writes.values() for base in bases)


def input_nodes(argument: Any) -> Iterator[fx.Node]:
    """Nodes in nested arguments."""
    if isinstance(argument, fx.Node):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            yield from input_nodes(item)
    elif isinstance(argument, dict):
        for item in argument.values():
            yield from input_nodes(item)
    elif isinstance(argument, slice):
        yield from input_nodes((argument.start, argument.stop, argument.step))


def storages(graph: fx.Graph, owner: Any) -> Storages:
    """Follow views and writes through a graph; `owner` holds the graphs of its regions (no_grad, autocast)."""
    found = Storages()
    for node in graph.nodes:
        if node.op != "call_function":
            found.bases[node] = frozenset((node,))
            continue
        aliased, written = _uses(node, owner)
        bases = _union(found, aliased)
        found.bases[node] = bases if bases else frozenset((node,))
        writes = _union(found, written)
        if writes:
            found.writes[node] = writes
    return found


def _union(found: Storages, nodes: Iterable[fx.Node]) -> Bases:
    return frozenset(base for node in nodes for base in found.bases[node])


def _uses(node: fx.Node, owner: Any) -> tuple[list[fx.Node], list[fx.Node]]:
    """Inputs that the node's value may be a view of, and inputs that it writes."""
    name = op_name(node.target)
    if name == OPAQUE_OP:
        return [], []
    if name == "operator.getitem":
        return list(input_nodes(node.args[0])), []
    known = operator_use(node.target)
    if known is None:
        region = region_of(node, owner)
        inputs = list(input_nodes((node.args, node.kwargs)))
        return inputs, (_written_by_region(node, region) if region is not None else [])
    aliased: list[fx.Node] = []
    written: list[fx.Node] = []
    for position, use in enumerate(known[0]):
        argument = node.args[position] if position < len(node.args) else node.kwargs.get(use.name)
        if use.written or _statistics(name, use.name, node):
            written.extend(input_nodes(argument))
        if use.aliased or (use.written and op_name(node.target).endswith("_")):
            aliased.extend(input_nodes(argument))
    return aliased, written


def _statistics(name: str, argument: str, node: fx.Node) -> bool:
    """Running statistics that batch-norm or instance-norm updates though its schema does not say so."""
    if name not in ("aten.batch_norm", "aten.instance_norm") or argument not in ("running_mean", "running_var"):
        return False
    return len(node.args) <= 5 or node.args[5] is not False


def region_of(node: fx.Node, owner: Any) -> fx.GraphModule | None:
    """The graph that a node runs as a whole, if it does."""
    for item in input_nodes(node.args):
        if item.op == "get_attr":
            region = getattr(owner, str(item.target), None)
            if isinstance(region, fx.GraphModule):
                return region
    return None


def _written_by_region(node: fx.Node, region: fx.GraphModule) -> list[fx.Node]:
    inner = storages(region.graph, region)
    inputs = [item for item in region.graph.nodes if item.op == "placeholder"]
    given = [item for item in input_nodes(node.args) if item.op != "get_attr"]
    return [outer for outer, item in zip(given, inputs, strict=False) if item in inner.written]


def draws_random(node: fx.Node, owner: Any) -> bool:
    """Whether the node takes numbers from torch's generator as it is called here; a whole module always may."""
    name = op_name(node.target)
    if name == OPAQUE_OP:
        return True
    known = operator_use(node.target)
    if known is None:
        region = region_of(node, owner)
        return region is not None and any(
            draws_random(item, region) for item in region.graph.nodes if item.op == "call_function"
        )
    if not known[1]:
        return False
    given: dict[str, Any] = {use.name: item for use, item in zip(known[0], node.args, strict=False)} | dict(
        node.kwargs
    )
    if name == "aten.scaled_dot_product_attention":
        return bool(given.get("dropout_p", 0.0))
    if "dropout" in given and "num_layers" in given:
        return bool(given["dropout"]) and given.get("train") is not False and given["num_layers"] != 1
    if "p" in given and "train" in given:
        return bool(given["p"]) and given["train"] is not False
    if name in ("aten.rrelu", "aten.rrelu_"):
        return given.get("training", False) is not False
    return True
