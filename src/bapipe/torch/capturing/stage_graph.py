"""The code of a stage as it grows: nodes of the trace copied with what they need."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from bapipe.errors import BaPipeError
from bapipe.torch.capturing.aliases import input_nodes
from bapipe.torch.capturing.device_moves import on_device
from bapipe.torch.capturing.eval_mode import evaluating
from bapipe.torch.capturing.leaf_modules import OpaqueCall
from bapipe.torch.capturing.linearise import Program
from bapipe.torch.capturing.seeded_rng import seed_node, seed_whole
from bapipe.torch.capturing.torch_internals import is_symbolic, op_name, size_at

__all__ = ["StageGraph", "copy_step", "load", "roots_of", "seed_step"]


@dataclass(slots=True)
class StageGraph:
    """A stage's graph as it grows."""

    program: Program
    graph: fx.Graph
    env: dict[fx.Node, Any]
    received: tuple[fx.Node, ...]
    roots: dict[fx.Node, fx.Node]
    """root input -> placeholder"""
    devices: tuple[torch.device, torch.device] | None
    state: dict[str, fx.Node]
    """get_attr target -> node of the program"""
    position: fx.Node
    recomputed: list[str]
    training: bool
    sliced: dict[str, tuple[fx.Node, int, int, int]]
    """get_attr target of which the stage has only a part -> node of the program, dimension, start, size"""


def roots_of(build: StageGraph, nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Inputs of the model that these nodes need, through free nodes; sizes are sought elsewhere first."""
    program, found, seen = build.program, set[fx.Node](), set[fx.Node]()
    sizes: list[fx.Node] = []
    waiting = list(nodes)
    inside = set(nodes)
    while waiting:
        node = waiting.pop()
        if node in seen or (node in build.env and node not in inside):
            continue
        seen.add(node)
        if program.kinds.get(node) == "input":
            if node not in build.env:
                found.add(node)
        elif op_name(node.target) == "aten.sym_size" and program.kinds.get(node) == "free":
            sizes.append(node)
        elif node in inside or program.kinds.get(node) == "free":
            waiting.extend(input_nodes((node.args, node.kwargs)))
    for node in sizes:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if source in inside or source in build.env or source in found:
            continue
        if _anchor(node, (*build.received, *found)) is None:
            extra = next((item for item in program.inputs if _anchor(node, (item,)) is not None), None)
            if extra is None:
                raise BaPipeError(f"the size '{node.name}' cannot be had on this stage; cut the model elsewhere")
            found.add(extra)
    return found


def _anchor(node: fx.Node, sources: Sequence[fx.Node]) -> tuple[fx.Node, int] | None:
    """A tensor at hand and its dimension that moves with the size that the node asks for."""
    wanted = node.meta["val"]
    exact, near = None, None
    for source in sources:
        value = source.meta.get("val")
        if not isinstance(value, Tensor):
            continue
        for dim, size in enumerate(value.shape):
            if str(size) == str(wanted):
                exact = exact or (source, dim)
            if is_symbolic(size):
                near = near or (source, dim)
    return exact or near


def seed_step(build: StageGraph, node: fx.Node, example: Any) -> None:
    """Before a random node: seed the generator of the device that the example lies on."""
    seeder = seed_whole if node in build.program.calls else seed_node
    build.graph.call_function(seeder, (build.position, build.program.random[node], example))


def copy_step(build: StageGraph, node: fx.Node) -> Any:
    """Add a step of the program, and whatever it needs that is at hand on any stage."""
    program = build.program
    if node in program.random:
        found = (item for item in input_nodes(node.args) if isinstance(item.meta.get("val"), Tensor))
        seed_step(build, node, next((load(build, item) for item in found), None))
    if node in program.calls:
        call: OpaqueCall = program.calls[node]
        owner = build.graph.get_attr(call.path) if call.path else None
        tensors = [load(build, item) for item in input_nodes(node.args[0])]
        build.env[node] = build.graph.call_function(_caller(call), (owner, tensors))
        return build.env[node]
    args = fx.map_arg(node.args, lambda item: load(build, item))
    kwargs = fx.map_arg(node.kwargs, lambda item: load(build, item))
    if build.devices is not None:
        args, kwargs = on_device(node.target, args, kwargs, build.devices)
    if not build.training:
        args, kwargs = evaluating(node.target, args, kwargs)
    build.env[node] = build.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
    return build.env[node]


def _caller(call: OpaqueCall) -> Callable[..., Any]:
    def whole_module(module: nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
        return call.run(module, tensors)

    return whole_module


def load(build: StageGraph, node: fx.Node) -> Any:
    """A value in the stage's code: received, computed, a weight, or recomputed."""
    if node in build.env:
        return build.env[node]
    program, kind = build.program, build.program.kinds[node]
    if kind in ("parameter", "buffer"):
        target = program.state[node]
    elif kind == "constant":
        target = f"_constant_{node.name}"
    elif kind == "region":
        target = f"_region_{node.target}"
    elif kind == "free":
        if op_name(node.target) == "aten.sym_size":
            build.env[node] = _size(build, node)
        else:
            build.recomputed.append(node.name)
            copy_step(build, node)
        return build.env[node]
    else:
        raise BaPipeError(f"'{node.name}' ({kind}) is needed on a stage that does not have it; cut elsewhere")
    build.state[target] = node
    build.env[node] = build.graph.get_attr(target)
    return build.env[node]


def _size(build: StageGraph, node: fx.Node) -> Any:
    """A size, asked of a tensor at hand."""
    source, dim = node.args
    assert isinstance(source, fx.Node)
    if source in build.env:
        return build.graph.call_function(node.target, (build.env[source], dim))  # type: ignore[arg-type]
    found = _anchor(node, (*build.received, *build.roots))
    assert found is not None
    anchor, dimension = found
    at_hand = build.graph.call_function(node.target, (build.env[anchor], dimension))  # type: ignore[arg-type]
    here, wanted = anchor.meta["val"].shape[dimension], node.meta["val"]
    if str(here) == str(wanted):
        return at_hand
    (scale, offset), (slope, fixed) = _linear(here), _linear(wanted)
    whole = build.graph.call_function(operator.sub, (at_hand, offset))
    samples = build.graph.call_function(operator.floordiv, (whole, scale))
    scaled = build.graph.call_function(operator.mul, (samples, slope))
    return build.graph.call_function(operator.add, (scaled, fixed))


def _linear(size: Any) -> tuple[int, int]:
    """(a, b) of a size that is a · samples + b."""
    slope = size_at(size, 3) - size_at(size, 2)
    return slope, size_at(size, 2) - 2 * slope
