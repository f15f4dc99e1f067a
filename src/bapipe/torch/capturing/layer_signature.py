"""Which layers compute the same: equal operations on values and weights of equal shapes, so equal costs.

The blocks of a transformer differ in their weights' values alone. Two layers of one signature take as long and
keep as much, and each can stand in the other's place: what the one sends, the layer after the other can receive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from bapipe.io.files import content_hash
from bapipe.torch.capturing.crossing_values import crossing
from bapipe.torch.capturing.layer_groups import Group
from bapipe.torch.capturing.linearise import Program
from bapipe.torch.capturing.torch_internals import op_name

__all__ = ["layer_signatures"]


def layer_signatures(program: Program, groups: Sequence[Group]) -> tuple[str, ...]:
    """One text per layer, equal for layers that compute the same. A module kept whole is like no other: what its
    code does is not known."""
    return tuple(_Describing(program).layer(group) for group in groups)


class _Describing:
    """The description of one layer; nodes are numbered as they are met, so that names do not matter."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._numbers: dict[fx.Node, int] = {}
        self._parts: list[Any] = []

    def layer(self, group: Group) -> str:
        program = self._program
        for node in crossing(program, group.start):
            self._add(node, "received", self._value(node), node in program.gradients)
        for node in program.steps[group.start : group.stop]:
            self._operation(node)
        if group.stop == len(program.steps):
            wanted: Sequence[Any] = program.outputs
        else:
            wanted = crossing(program, group.stop)
        return content_hash([self._parts, _argument(list(wanted), self._number)])

    def _add(self, node: fx.Node, *about: Any) -> int:
        self._numbers[node] = number = len(self._numbers)
        self._parts.append([number, *about])
        return number

    def _operation(self, node: fx.Node) -> int:
        if node in self._program.calls:
            return self._add(node, "whole module", str(node.args[1]))
        given = [_argument(list(node.args), self._number), _argument(dict(node.kwargs), self._number)]
        return self._add(node, op_name(node.target), *given, self._value(node), node in self._program.gradients)

    def _number(self, node: fx.Node) -> int:
        """The node's number; a weight, an input or a free node is described where it is met first."""
        if node in self._numbers:
            return self._numbers[node]
        kind = self._program.kinds.get(node, node.op)
        if kind == "input":
            return self._add(node, "input", self._program.inputs.index(node))
        if kind == "region":
            region = getattr(self._program.owner, str(node.target), None)
            described = _graph(region.graph) if isinstance(region, fx.GraphModule) else str(node.target)
            return self._add(node, "region", described)
        if node.op == "call_function":
            return self._operation(node)
        return self._add(node, kind, self._value(node), node in self._program.gradients)

    def _value(self, node: fx.Node) -> Any:
        return _about(node.meta.get("val"))


def _argument(value: Any, number: Callable[[fx.Node], int]) -> Any:
    """An operation's argument as plain values, nodes in it by their number."""
    if isinstance(value, fx.Node):
        return {"node": number(value)}
    if isinstance(value, (list, tuple)):
        return [_argument(item, number) for item in value]
    if isinstance(value, dict):
        return {str(key): _argument(item, number) for key, item in value.items()}
    return repr(value)


def _about(value: Any) -> Any:
    """Shape, strides and dtype; free sizes by the name of their symbol."""
    if isinstance(value, Tensor):
        return [str(tuple(value.shape)), str(value.stride()), str(value.dtype)]
    if isinstance(value, (list, tuple)):
        return [_about(item) for item in value]
    return repr(value)


def _graph(graph: fx.Graph) -> list[Any]:
    """A region's operations, with nodes by their position."""
    numbers: dict[fx.Node, int] = {}
    number = numbers.__getitem__
    found = []
    for node in graph.nodes:
        name = op_name(node.target) if node.op == "call_function" else node.op
        given = [_argument(list(node.args), number), _argument(dict(node.kwargs), number)]
        found.append([name, *given, _about(node.meta.get("val"))])
        numbers[node] = len(numbers)
    return found
