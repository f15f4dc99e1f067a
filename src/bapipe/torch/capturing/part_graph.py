"""The code of a stage that has only a part of a layer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from bapipe.torch.capturing.crossing_values import Value, dims_of, memory_order
from bapipe.torch.capturing.eval_mode import evaluating
from bapipe.torch.capturing.layer_division import PartRule, StepRule
from bapipe.torch.capturing.linearise import Program
from bapipe.torch.capturing.part_ops import (
    join_loss,
    join_parts,
    join_statistics,
    lstm_direction,
    lstm_steps,
    part_dropout,
    part_statistics,
)
from bapipe.torch.capturing.stage_graph import StageGraph, copy_step, load, seed_step
from bapipe.torch.capturing.torch_internals import op_name

__all__ = ["copy_part", "partial_values"]

_MAKERS = frozenset({"aten.dropout", "aten.cat", "aten.add", "aten.mul"})
"""operations that are usual before an LSTM and return memory of their own"""


def partial_values(program: Program, rule: PartRule, done: int) -> tuple[Value, ...]:
    """What crosses a cut within the layer besides what crosses before it: the result of the first `done` channels.

    Contiguous, dimensions in their own order.
    """

    def value(number: int, node_value: Any, dims: Sequence[tuple[int, int]]) -> Value:
        return Value(
            name=f"{rule.output.name}_part{number}",
            dims=tuple(dims),
            dtype=node_value.dtype,
            requires_grad=rule.output in program.gradients,
        )

    if rule.by == "vocabulary":
        logits = rule.output.args[0]
        assert isinstance(logits, fx.Node)
        tensor = logits.meta["val"]
        return tuple(value(number, tensor, dims_of(program, tensor)[:1]) for number in range(3))
    whole = rule.output.meta["val"]
    dims = list(dims_of(program, whole))
    slope, fixed = dims[rule.dim]
    dims[rule.dim] = (slope * done // rule.channels, fixed * done // rule.channels)
    if rule.by != "time steps":
        return (value(0, whole, dims),)
    states = rule.anchor.meta["val"][1:3]
    return (value(0, whole, dims), *(value(n + 1, item, dims_of(program, item)) for n, item in enumerate(states)))


def copy_part(
    build: StageGraph, rule: PartRule, steps: Sequence[fx.Node], *, start: int, stop: int, before: Sequence[Any]
) -> list[Any]:
    """Add channels `start` to `stop` of a layer to the stage's code, joined to those `before` them.

    Returns the result of all channels up to `stop`, as `partial_values` describes it; nothing where that is the
    whole layer, whose result is then at hand as if it had run whole.
    """
    own: dict[fx.Node, Any] = {}
    states: list[Any] = []
    for node in steps:
        step = rule.steps.get(node)
        if step is None:
            copy_step(build, node)
        elif node is rule.anchor and step.kind == "lstm":
            alone = _is_made_by(rule.anchor.args[0], steps)
            own[node], *states = _copy_lstm(build, rule, start, stop, before, alone=alone)
        elif step.kind == "lstm":
            own[node] = own[rule.anchor]
        else:
            own[node] = _copy_sliced(build, rule, step, node, own, start, stop)
    return _joined(build, rule, own[rule.output], states, before, start, stop)


def _call(build: StageGraph, function: Callable[..., Any], *args: Any) -> fx.Node:
    return build.graph.call_function(function, args)


def _items(build: StageGraph, value: fx.Node, count: int) -> list[Any]:
    return [_call(build, operator.getitem, value, number) for number in range(count)]


def _copy_sliced(
    build: StageGraph,
    rule: PartRule,
    step: StepRule,
    node: fx.Node,
    own: dict[fx.Node, Any],
    start: int,
    stop: int,
) -> Any:
    count = rule.channels

    def sliced(item: fx.Node, dim: int) -> Any:
        size = build.program.sizes(item.meta["val"])[dim]
        low, length = size * start // count, size * (stop - start) // count
        if build.program.kinds[item] in ("parameter", "buffer"):
            target = build.program.state[item]
            build.sliced[target] = (item, dim, low, length)
            return build.graph.get_attr(target)
        return _call(build, torch.narrow, load(build, item), dim, low, length)

    def loaded(item: fx.Node) -> Any:
        if item in own:
            return own[item]
        return sliced(item, step.slices[item]) if item in step.slices else load(build, item)

    if step.kind == "loss":
        logits, target = node.args[:2]
        assert isinstance(logits, fx.Node)
        assert isinstance(target, fx.Node)
        made = _call(build, part_statistics, own[logits], load(build, target), start)
        return _items(build, made, 3)
    args, kwargs = fx.map_arg(node.args, loaded), fx.map_arg(node.kwargs, loaded)
    if not build.training:
        args, kwargs = evaluating(node.target, args, kwargs)
    if step.kind == "dropout":
        value, p, train = args[0], args[1], args[2]
        if node in build.program.random:
            seed_step(build, node, value)
        size = step.full[step.dim]
        whole = op_name(node.target) == "aten.feature_dropout"
        order = memory_order(build.program, node.meta["val"])
        return _call(build, part_dropout, value, p, train, whole, step.dim, size * start // count, size, order)
    if step.kind == "reshape" and len(args) > 1 and isinstance(args[1], (list, tuple)):
        sizes = list(args[1])
        if isinstance(sizes[step.dim], int) and sizes[step.dim] > 0:
            sizes[step.dim] = sizes[step.dim] * (stop - start) // count
        args = (args[0], sizes)
    return build.graph.call_function(node.target, tuple(args), kwargs)  # type: ignore[arg-type]


def _is_made_by(value: Any, steps: Sequence[fx.Node]) -> bool:
    """Whether a value is one of these steps' own, and not their input, seen as it is or in another shape."""
    return isinstance(value, fx.Node) and value in steps and op_name(value.target) in _MAKERS


def _copy_lstm(
    build: StageGraph, rule: PartRule, start: int, stop: int, before: Sequence[Any], *, alone: bool
) -> list[Any]:
    """The output of some directions, or of some time steps and the state after them.

    `alone`: the LSTM's input is for it alone.
    """
    args: tuple[Any, ...] = tuple(rule.anchor.args)
    value, state, weights = args[0], list(args[1]), list(args[2])
    train, batch_first = bool(args[6]) and build.training, args[8]
    given = load(build, value)
    if rule.by == "time steps":
        states = list(before[1:3]) if start else [load(build, item) for item in state]
        own = [load(build, item) for item in weights]
        made = _call(build, lstm_steps, given, states, own, train, batch_first, start, stop - start, alone)
        return _items(build, made, 3)
    each = len(weights) // 2
    states = [load(build, item) for item in state]
    ways = []
    for direction in range(start, stop):
        own = [load(build, item) for item in weights[direction * each : (direction + 1) * each]]
        ways.append(_call(build, lstm_direction, given, states, own, train, batch_first, direction))
    return [ways[0] if len(ways) == 1 else _call(build, torch.cat, ways, rule.steps[rule.anchor].dim)]


def _joined(
    build: StageGraph,
    rule: PartRule,
    own: Any,
    states: Sequence[Any],
    before: Sequence[Any],
    start: int,
    stop: int,
) -> list[Any]:
    complete = stop == rule.channels
    if rule.by == "vocabulary":
        together = own
        if start:
            together = _items(build, _call(build, join_statistics, list(before), own), 3)
        if not complete:
            return list(together)
        node = rule.output
        target = node.args[1]
        assert isinstance(target, fx.Node)
        options = (*node.args[3:], *(1, -100, 0.0)[len(node.args[3:]) :])
        build.env[node] = _call(build, join_loss, together, load(build, target), rule.channels, *options)
        return []
    if start:
        order = memory_order(build.program, rule.output.meta["val"])
        own = _call(build, join_parts, before[0], own, rule.dim, order)
    if complete:
        build.env[rule.output] = own
        return []
    return [own, *states]
