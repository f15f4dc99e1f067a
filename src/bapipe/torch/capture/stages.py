"""Stages: consecutive layers as a module that runs alone, with the model's own parameter names."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from bapipe.errors import BaPipeError
from bapipe.torch.capture.aliases import input_nodes
from bapipe.torch.capture.cuts import Value, crossing, memory_order, value_of
from bapipe.torch.capture.devices import moved_region, on_device
from bapipe.torch.capture.linearise import Program
from bapipe.torch.capture.opaque import OpaqueCall
from bapipe.torch.capture.private import is_symbolic, op_name, size_at
from bapipe.torch.capture.rng import Position, seed_node, seed_whole

__all__ = ["Root", "Stage", "StageSpec", "build_stage", "fill_stage"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """An input of the model that a stage takes from the data, not from the stage before."""

    index: int
    """of the leaf among the flattened (args, kwargs)"""
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """What goes into a stage and comes out.

    `forward` takes the `received` values, then the `roots`, one argument each, and returns the `sent` values as a
    tuple; the last stage returns the leaves of the model's output, for `Captured.output`.
    """

    first: int
    """layer"""
    last: int
    """layer, included"""
    received: tuple[Value, ...]
    """from the stage before; values that only pass through are among them"""
    roots: tuple[Root, ...]
    sent: tuple[Value, ...]
    """to the next stage; () at the last"""
    is_last: bool
    recomputed: tuple[str, ...]
    """nodes without parameters (masks, positions, rotary) that this stage computes for itself"""
    random: tuple[int, ...]
    """numbers of the nodes that draw random numbers"""


class Stage(nn.Module):
    """Consecutive layers. Parameters and buffers have the model's names and are the model's own objects.

    Set `rng_position` to (step, micro-batch) before a forward and dropout draws the same numbers under any
    partition; None leaves the generator alone.
    """

    stage_spec: StageSpec

    def __init__(self, spec: StageSpec, function: Callable[..., tuple[Any, ...]], source: str) -> None:
        super().__init__()
        self.stage_spec = spec
        self.stage_source = source
        self.rng_position: Position | None = None
        self._stage_function = function

    def forward(self, *values: Any) -> tuple[Any, ...]:
        spec = self.stage_spec
        if len(values) != len(spec.received) + len(spec.roots):
            raise BaPipeError(
                f"the stage of layers {spec.first} to {spec.last} takes {len(spec.received)} received values and "
                f"{len(spec.roots)} inputs, got {len(values)}; give them all"
            )
        return self._stage_function(self, self.rng_position, *values)


def fill_stage(stage: Stage, state: Mapping[str, Tensor], *, device: torch.device | str = "cpu") -> Stage:
    """A copy of a stage with memory of its own on a device, filled from the state of the whole model by name.

    What the state does not have (buffers that are not saved, constants of the trace) is as it was captured. Meant
    for models captured without memory; of others it copies what it fills.
    """
    filled = copy.deepcopy(stage).to_empty(device=device)
    captured = dict((*stage.named_parameters(), *stage.named_buffers()))
    with torch.no_grad():
        for name, tensor in (*filled.named_parameters(), *filled.named_buffers()):
            source = state.get(name, captured[name])
            if source.is_meta:
                raise BaPipeError(
                    f"nothing to fill '{name}' with: the model was captured without memory and the state has no "
                    "such entry; give the whole model's state_dict"
                )
            tensor.copy_(source)
    return filled


@dataclass(slots=True)
class _Build:
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


def build_stage(
    program: Program,
    module: nn.Module,
    *,
    steps: tuple[int, int],
    layers: tuple[int, int],
    device: torch.device | None = None,
) -> Stage:
    """The stage of steps `steps[0]` to `steps[1]` (exclusive); `device` replaces the one that was traced on."""
    start, stop = steps
    end = len(program.steps)
    received = crossing(program, start)
    graph = fx.Graph()
    position = last_input = graph.placeholder("position")
    env: dict[fx.Node, Any] = {}
    trained = {node for node in program.inputs if node in program.gradients}
    for node in received:
        env[node] = last_input = graph.placeholder(node.name)
    for node in received:
        order = memory_order(program, node.meta["val"])
        env[node] = _permuted(graph, env[node], tuple(order.index(dim) for dim in range(len(order))))
    traced = _traced_device(program)
    build = _Build(
        program=program,
        graph=graph,
        env=env,
        received=received,
        roots={},
        devices=(traced, device) if device is not None and device != traced else None,
        state={},
        position=position,
        recomputed=[],
    )
    sent = crossing(program, stop) if stop < end else ()
    wanted: Sequence[Any] = sent if stop < end else program.outputs
    needed = _roots(build, (*program.steps[start:stop], *(node for node in wanted if isinstance(node, fx.Node))))
    if start == 0:
        needed |= trained & set(sent)
    roots = [(index, node) for index, node in enumerate(program.inputs) if node in needed and node not in env]
    for _, node in roots:
        with graph.inserting_after(last_input):
            build.roots[node] = env[node] = last_input = graph.placeholder(node.name)
    for node in program.steps[start:stop]:
        _copy(build, node)
    results = [_load(build, item) if isinstance(item, fx.Node) else item for item in wanted]
    if stop < end:
        pairs = zip(results, sent, strict=True)
        results = [_permuted(graph, value, memory_order(program, node.meta["val"])) for value, node in pairs]
    graph.output(tuple(results))
    code = graph.python_code("self")
    namespace: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, f"<stage of layers {layers[0]} to {layers[1]}>", "exec"), namespace)
    spec = StageSpec(
        first=layers[0],
        last=layers[1],
        received=tuple(value_of(program, node) for node in received),
        roots=tuple(Root(index=index, name=node.name) for index, node in roots),
        sent=tuple(value_of(program, node) for node in sent),
        is_last=stop == end,
        recomputed=tuple(build.recomputed),
        random=tuple(program.random[node] for node in program.steps[start:stop] if node in program.random),
    )
    stage = Stage(spec, namespace["forward"], code.src)
    _attach(stage, build, module, program.steps[start:stop])
    return stage


def _permuted(graph: fx.Graph, value: fx.Node, order: tuple[int, ...]) -> fx.Node:
    if order == tuple(range(len(order))):
        return value
    return graph.call_function(torch.permute, (value, order))


def _traced_device(program: Program) -> torch.device:
    for node in program.steps:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            return value.device
    return torch.device("cpu")


def _roots(build: _Build, nodes: Sequence[fx.Node]) -> set[fx.Node]:
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


def _copy(build: _Build, node: fx.Node) -> Any:
    program = build.program
    if node in program.random:
        example = next(
            (_load(build, item) for item in input_nodes(node.args) if isinstance(item.meta.get("val"), Tensor)),
            None,
        )
        seeder = seed_whole if node in program.calls else seed_node
        build.graph.call_function(seeder, (build.position, program.random[node], example))
    if node in program.calls:
        call: OpaqueCall = program.calls[node]
        owner = build.graph.get_attr(call.path) if call.path else None
        tensors = [_load(build, item) for item in input_nodes(node.args[0])]
        build.env[node] = build.graph.call_function(_caller(call), (owner, tensors))
        return build.env[node]
    args = fx.map_arg(node.args, lambda item: _load(build, item))
    kwargs = fx.map_arg(node.kwargs, lambda item: _load(build, item))
    if build.devices is not None:
        args, kwargs = on_device(node.target, args, kwargs, build.devices)
    build.env[node] = build.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
    return build.env[node]


def _caller(call: OpaqueCall) -> Callable[..., Any]:
    def whole_module(module: nn.Module, tensors: Sequence[Tensor]) -> list[Tensor]:
        return call.run(module, tensors)

    return whole_module


def _load(build: _Build, node: fx.Node) -> Any:
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
            _copy(build, node)
        return build.env[node]
    else:
        raise BaPipeError(f"'{node.name}' ({kind}) is needed on a stage that does not have it; cut elsewhere")
    build.state[target] = node
    build.env[node] = build.graph.get_attr(target)
    return build.env[node]


def _size(build: _Build, node: fx.Node) -> Any:
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


def _attach(stage: Stage, build: _Build, module: nn.Module, steps: Sequence[fx.Node]) -> None:
    """Register all that the stage's code refers to, whole modules first."""
    program = build.program
    for path in sorted({program.calls[node].path for node in steps if node in program.calls}):
        owner, name = _owner(stage, path, module)
        owner.add_module(name, module.get_submodule(path))
    for target, node in build.state.items():
        kind = program.kinds[node]
        if kind == "constant":
            stage.register_buffer(target, program.constants[node], persistent=False)
        elif kind == "region":
            stage.add_module(target, moved_region(getattr(program.owner, str(node.target)), build.devices))
        else:
            owner, name = _owner(stage, target, module)
            if hasattr(owner, name):
                continue
            if kind == "parameter":
                owner.register_parameter(name, module.get_parameter(target))
            else:
                owner.register_buffer(name, module.get_buffer(target), persistent=_is_persistent(module, target))


def _owner(stage: nn.Module, target: str, module: nn.Module) -> tuple[nn.Module, str]:
    """The module that holds the target, made if need be: a recurrent one is the model's own, else a bare one.

    A recurrent module lays its weights out for cuDNN whenever it is moved to a device.
    """
    *path, name = target.split(".")
    owner = stage
    for depth, part in enumerate(path):
        child = getattr(owner, part, None)
        if child is None:
            original = module.get_submodule(".".join(path[: depth + 1]))
            child = original if isinstance(original, nn.RNNBase) else nn.Module()
            owner.add_module(part, child)
        owner = child
    return owner, name


def _is_persistent(module: nn.Module, target: str) -> bool:
    path, _, name = target.rpartition(".")
    owner = module.get_submodule(path)
    return name in owner.state_dict(keep_vars=True)
