"""A captured layer as a function without side effects, which can be traced and compiled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from bapipe.errors import BaPipeError
from bapipe.torch.capturing import Stage
from bapipe.torch.capturing.part_ops import lstm_direction, lstm_steps
from bapipe.torch.capturing.seeded_rng import seed_node, seed_whole
from bapipe.torch.capturing.torch_internals import op_name, operator_use
from bapipe.torch.compiling.seeded_dropout import seeded_dropout

__all__ = ["LayerResult", "TracedLayer"]

_RECURRENT = frozenset(f"aten.{name}" for name in ("gru", "lstm", "rnn_relu", "rnn_tanh")) | {
    op_name(function) for function in (lstm_direction, lstm_steps)
}
_RUNNING_STATISTICS = frozenset({"aten.batch_norm", "aten.instance_norm", "aten.native_batch_norm"})
"""operations that write buffers without saying so"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerResult:
    """Where one of the layer's results comes from."""

    passed: int | None = None
    """the argument that it is, as it was received; None: it is computed, or a constant"""
    constant: Any = None
    computed: bool = False


class TracedLayer:
    """The code of one layer, taken apart into what it takes, what it computes, and what it only passes on.

    Raises BaPipeError, with the reason, for a layer that cannot be traced.
    """

    def __init__(self, stage: Stage) -> None:
        if stage.stage_graph is None or stage.stage_spec.whole:
            raise BaPipeError("it has a leaf module, which is not traced")
        self._stage = stage
        self._graph = stage.stage_graph
        if any(op_name(node.target) in _RECURRENT for node in self._graph.nodes):
            raise BaPipeError("a recurrent layer would be compiled time step by time step")
        self.weights: list[str] = []
        """names of its parameters"""
        self.state: list[str] = []
        """names of its buffers and constants"""
        self.numbers: tuple[int, ...] = tuple(
            int(node.args[1]) for node in self._graph.nodes if node.target in (seed_node, seed_whole)
        )
        """of its random nodes, in order"""
        written: list[str] = []
        for node in self._graph.nodes:
            if node.op != "get_attr":
                continue
            found = _attribute(stage, str(node.target))
            names = self.weights if isinstance(found, nn.Parameter) else self.state
            if isinstance(found, Tensor) and str(node.target) not in names:
                names.append(str(node.target))
            if isinstance(found, Tensor) and not isinstance(found, nn.Parameter) and _is_written(node):
                written.append(str(node.target))
        self.written = tuple(dict.fromkeys(written))
        """names of the buffers that it writes"""
        self.results = tuple(_result(item) for item in self._graph_outputs())
        self.seeds_itself = self._draws_otherwise()
        """the number of the first random node that is no dropout, which the generator is seeded by; None: there
        is none"""

    def _graph_outputs(self) -> Sequence[Any]:
        end = next(node for node in self._graph.nodes if node.op == "output")
        found: Any = end.args[0]
        return list(found)

    def _draws_otherwise(self) -> int | None:
        number = None
        for node in self._graph.nodes:
            if node.target in (seed_node, seed_whole):
                number = int(node.args[1])
            elif number is not None:
                if not _is_dropout(node):
                    return number
                number = None
        return None

    def run(self, *arguments: Tensor) -> tuple[Tensor, ...]:
        """Weights, state, the key of random numbers if there are any, then values; returns the computed results,
        then the new values of the written buffers."""
        names = [*self.weights, *self.state]
        state = dict(zip(names, arguments, strict=False))
        state |= {name: state[name].clone() for name in self.written}
        rest = arguments[len(names) :]
        key, values = (rest[0], rest[1:]) if self.numbers else (None, rest)
        made = _Traced(self._stage, self._graph, state, key).run(None, *values)
        computed = [value for value, about in zip(made, self.results, strict=True) if about.computed]
        if not all(isinstance(value, Tensor) for value in computed):
            raise BaPipeError("it returns a number that depends on its input")
        return (*computed, *(state[name] for name in self.written))


class _Traced(fx.Interpreter):
    """Runs the graph with given weights and buffers; dropout draws as the layer does eagerly."""

    def __init__(self, stage: Stage, graph: fx.Graph, state: Mapping[str, Tensor], key: Tensor | None) -> None:
        super().__init__(stage, graph=graph)
        self._given = state
        self._key = key
        self._random = 0

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        given = self._given.get(target)
        return super().get_attr(target, args, kwargs) if given is None else given

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in (seed_node, seed_whole):
            self._random += 1
            return None
        if op_name(target) == "aten.dropout" and not kwargs and args[2]:
            if args[1] == 0:  # which draws nothing
                return args[0]
            assert self._key is not None
            return seeded_dropout(args[0], args[1], self._key, self._random - 1)
        return super().call_function(target, args, kwargs)


def _attribute(stage: Stage, target: str) -> Any:
    found: Any = stage
    for part in target.split("."):
        found = getattr(found, part)
    return found


def _is_dropout(node: fx.Node) -> bool:
    return op_name(node.target) == "aten.dropout" and not node.kwargs and bool(node.args[2])


def _is_written(node: fx.Node) -> bool:
    """Whether an operation writes a buffer."""
    for user in node.users:
        if op_name(user.target) in _RUNNING_STATISTICS:
            return True
        use = operator_use(user.target)
        if use is None:
            continue
        for argument, given in zip(use[0], user.args, strict=False):
            if argument.written and given is node:
                return True
    return False


def _result(item: Any) -> LayerResult:
    """A value that is received and goes on may be turned on its way in and back on its way out."""
    if not isinstance(item, fx.Node):
        return LayerResult(constant=item)
    source: Any = item
    order: Sequence[int] | None = None
    while source.op == "call_function" and source.target is torch.permute:
        source, inner = source.args[:2]
        order = inner if order is None else [inner[dim] for dim in order]
    turned = order is not None and list(order) != list(range(len(order)))
    if source.op != "placeholder" or turned:
        return LayerResult(computed=True)
    places = [node for node in source.graph.nodes if node.op == "placeholder"]
    return LayerResult(passed=places.index(source) - 1)
