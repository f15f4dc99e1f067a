"""Stages: consecutive layers as a module that runs alone, with the model's own parameter names."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from bapipe.errors import BaPipeError
from bapipe.torch.capturing.crossing_values import Value, crossing, memory_order, value_of
from bapipe.torch.capturing.device_moves import moved_region
from bapipe.torch.capturing.eval_mode import evaluating_region
from bapipe.torch.capturing.layer_division import required_rule
from bapipe.torch.capturing.layer_groups import Group
from bapipe.torch.capturing.linearise import Program, canonical_names
from bapipe.torch.capturing.loss_graph import count_nodes, own_loss
from bapipe.torch.capturing.part_graph import copy_part, partial_values
from bapipe.torch.capturing.seeded_rng import Position
from bapipe.torch.capturing.stage_graph import StageGraph, copy_step, load, roots_of
from bapipe.torch.capturing.torch_internals import swap_parameter

__all__ = ["Root", "Slice", "Stage", "StageSpec", "build_stage", "fill_stage"]

_PLACE = re.compile(r'File "(?![^"]*/torch/)([^"]+)", line (\d+)')
"""of the frames that the trace keeps of a node, those that are not torch's"""


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
    whole: tuple[str, ...]
    """paths of the modules that are kept whole, whose code runs anew every time"""
    counts_loss: bool = False
    """whether it returns, after all else, what the model's own loss is a mean over"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """A part of a weight: entries `start` to `start + size` of `of` along a dimension."""

    dim: int
    start: int
    size: int
    of: int


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
        self.stage_origins: dict[str, tuple[str, str]] = {}
        """variable of the source -> the layer it is computed in, and the place in the model's code, if known"""
        self.stage_slices: dict[str, Slice] = {}
        """of which weights and buffers the stage has only a slice"""
        self.stage_graph: fx.Graph | None = None
        """what the source was made from; its first input is the position"""
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

    @property
    def computed_by(self) -> Callable[..., tuple[Any, ...]]:
        """What computes its forward: the captured code, or what `run_by` was given."""
        return self._stage_function

    def run_by(self, function: Callable[..., tuple[Any, ...]], spec: StageSpec) -> None:
        """Let another function compute what the captured code does; it is given the stage, `rng_position` and the
        values, as its `spec` has them."""
        self._stage_function, self.stage_spec = function, spec


def fill_stage(stage: Stage, state: Mapping[str, Tensor], *, device: torch.device | str = "cpu") -> Stage:
    """A copy of a stage with memory of its own on a device, filled from the state of the whole model by name.

    What the state does not have (buffers that are not saved, constants of the trace) is as it was captured. Meant
    for models captured without memory; of others it copies what it fills.
    """
    filled = copy.deepcopy(stage).to_empty(device=device)
    for name, first in canonical_names(stage).items():
        if name != first:  # each name has memory of its own now
            path, _, own = name.rpartition(".")
            origin, _, same = first.rpartition(".")
            swap_parameter(filled.get_submodule(path), own, getattr(filled.get_submodule(origin), same))
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


def build_stage(
    program: Program,
    module: nn.Module,
    *,
    layers: tuple[int, int],
    groups: Sequence[Group],
    parts: Mapping[int, tuple[int, int]],
    store: dict[tuple[str, int, int], Tensor],
    device: torch.device | None = None,
    training: bool = True,
    count_loss: bool = False,
) -> Stage:
    """The stage of layers `layers[0]` to `layers[1]` (included); `device` replaces the one that was traced on.

    Without `training` it is the stage in evaluation mode; modules that are kept whole follow `Stage.eval()`. Of
    the layers in `parts` it has channels start to stop only; slices of weights come from the `store`, or go there.
    With `count_loss` the last stage counts what the model's own loss is a mean over, where it is one over a count.
    """
    first, last = groups[layers[0]], groups[layers[1]]
    end = len(program.steps)
    rules = {layer: required_rule(program, groups[layer]) for layer in parts}
    begun = parts.get(layers[0], (0, 0))[0]
    ended = parts[layers[1]][1] if layers[1] in parts else 0
    unfinished = layers[1] in parts and ended < rules[layers[1]].channels
    start, stop = first.start, last.stop
    received = crossing(program, start)
    sent = crossing(program, last.start if unfinished else stop)
    complete = stop == end and not unfinished
    build, last_input, before = _begin(program, received, device, training)
    for number in range(len(partial_values(program, rules[layers[0]], begun)) if begun else 0):
        with build.graph.inserting_after(last_input):
            last_input = build.graph.placeholder(f"part_{number}")
        before.append(last_input)
    wanted: Sequence[Any] = program.outputs if complete else sent
    needed = roots_of(build, (*program.steps[start:stop], *(node for node in wanted if isinstance(node, fx.Node))))
    if start == 0:
        needed |= {node for node in program.inputs if node in program.gradients} & set(sent)
    roots = [
        (index, node) for index, node in enumerate(program.inputs) if node in needed and node not in build.env
    ]
    for _, node in roots:
        with build.graph.inserting_after(last_input):
            build.roots[node] = build.env[node] = last_input = build.graph.placeholder(node.name)
    left: list[Any] = []
    for layer in range(layers[0], layers[1] + 1):
        steps = program.steps[groups[layer].start : groups[layer].stop]
        if layer in parts:
            low, high = parts[layer]
            left = copy_part(build, rules[layer], steps, start=low, stop=high, before=before if low else ())
            continue
        for node in steps:
            copy_step(build, node)
    found = own_loss(program) if complete and count_loss else None
    count = None if found is None or found.kind != "counted" else count_nodes(build, found)
    results = [load(build, item) if isinstance(item, fx.Node) else item for item in wanted]
    if not complete:
        pairs = zip(results, sent, strict=True)
        results = [_permuted(build.graph, value, memory_order(program, node.meta["val"])) for value, node in pairs]
    build.graph.output((*results, *left, *(() if count is None else (count,))))
    code = build.graph.python_code("self")
    namespace: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, f"<stage of layers {layers[0]} to {layers[1]}>", "exec"), namespace)
    steps = program.steps[start:stop]
    spec = StageSpec(
        first=layers[0],
        last=layers[1],
        received=(
            *(value_of(program, node) for node in received),
            *(partial_values(program, rules[layers[0]], begun) if begun else ()),
        ),
        roots=tuple(Root(index=index, name=node.name) for index, node in roots),
        sent=()
        if complete
        else (
            *(value_of(program, node) for node in sent),
            *(partial_values(program, rules[layers[1]], ended) if unfinished else ()),
        ),
        is_last=complete,
        recomputed=tuple(build.recomputed),
        random=tuple(program.random[node] for node in steps if node in program.random),
        whole=tuple(sorted({program.calls[node].path for node in steps if node in program.calls})),
        counts_loss=count is not None,
    )
    stage = Stage(spec, namespace["forward"], code.src)
    stage.stage_graph = build.graph
    stage.stage_origins = {
        build.env[node].name: (groups[layer].name, _place(node))
        for layer in range(layers[0], layers[1] + 1)
        for node in program.steps[groups[layer].start : groups[layer].stop]
        if isinstance(build.env.get(node), fx.Node)
    }
    _attach(stage, build, module, steps, store)
    return stage


def _place(node: fx.Node) -> str:
    """file:line of the model's own code that made a node; empty if the trace does not say."""
    found = _PLACE.findall(node.meta.get("stack_trace") or "")
    return ":".join(found[-1]) if found else ""


def _begin(
    program: Program, received: Sequence[fx.Node], device: torch.device | None, training: bool
) -> tuple[StageGraph, fx.Node, list[fx.Node]]:
    """A graph that has what the stage receives, its last input so far, and an empty list."""
    graph = fx.Graph()
    position = last_input = graph.placeholder("position")
    env: dict[fx.Node, Any] = {}
    for node in received:
        env[node] = last_input = graph.placeholder(node.name)
    for node in received:
        order = memory_order(program, node.meta["val"])
        env[node] = _permuted(graph, env[node], tuple(order.index(dim) for dim in range(len(order))))
    traced = _traced_device(program)
    build = StageGraph(
        program=program,
        graph=graph,
        env=env,
        received=tuple(received),
        roots={},
        devices=(traced, device) if device is not None and device != traced else None,
        state={},
        position=position,
        recomputed=[],
        training=training,
        sliced={},
    )
    return build, last_input, []


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


def _attach(
    stage: Stage,
    build: StageGraph,
    module: nn.Module,
    steps: Sequence[fx.Node],
    store: dict[tuple[str, int, int], Tensor],
) -> None:
    """Register all that the stage's code refers to, whole modules first."""
    program = build.program
    for target, (node, dim, start, size) in build.sliced.items():
        if target in build.state:
            raise BaPipeError(f"'{target}' is used by several layers, so none of them can be split; plan without")
        device = None if build.devices is None else build.devices[1]
        _attach_slice(stage, module, target, program.kinds[node], (dim, start, size), store, device)
    paths = sorted({program.calls[node].path for node in steps if node in program.calls})
    # What such a module shares with others comes first, so that it has the same name on every stage.
    for target in _shared_outside(module, paths):
        _register(stage, module, target, build.state)
    for path in paths:
        owner, name = _owner(stage, path, module, build.state)
        owner.add_module(name, module.get_submodule(path))
    for target, node in build.state.items():
        kind = program.kinds[node]
        if kind == "constant":
            stage.register_buffer(target, program.constants[node], persistent=False)
        elif kind == "region":
            region = getattr(program.owner, str(node.target))
            if not build.training:
                region = evaluating_region(region)
            stage.add_module(target, moved_region(region, build.devices))
        else:
            _register(stage, module, target, build.state)


def _shared_outside(module: nn.Module, paths: Sequence[str]) -> list[str]:
    """Names of the parameters and buffers that the modules of these paths have by other names, outside of all."""
    if not paths:
        return []
    within = tuple(f"{path}." for path in paths)
    names = {first: None for name, first in canonical_names(module).items() if name.startswith(within)}
    return [name for name in names if not name.startswith(within)]


def _register(stage: Stage, module: nn.Module, target: str, used: Collection[str]) -> None:
    """A parameter or buffer of the model under its name, if the stage does not have it."""
    owner, name = _owner(stage, target, module, used)
    if hasattr(owner, name):
        return
    path, _, _ = target.rpartition(".")
    tensor = getattr(module.get_submodule(path), name)
    if isinstance(tensor, nn.Parameter):
        owner.register_parameter(name, tensor)
    else:
        owner.register_buffer(name, tensor, persistent=_is_persistent(module, target))


def _attach_slice(
    stage: Stage,
    module: nn.Module,
    target: str,
    kind: str,
    where: tuple[int, int, int],
    store: dict[tuple[str, int, int], Tensor],
    device: torch.device | None,
) -> None:
    """A part of a weight, with memory of its own, under the whole one's name."""
    dim, start, size = where
    path, _, name = target.rpartition(".")
    owner = stage
    for part in path.split(".") if path else ():
        if not hasattr(owner, part):
            owner.add_module(part, nn.Module())
        owner = getattr(owner, part)
    whole = module.get_parameter(target) if kind == "parameter" else module.get_buffer(target)
    key = (target, start, size)
    if key not in store:
        part_of = whole.detach().narrow(dim, start, size).to(device or whole.device, copy=True)
        store[key] = nn.Parameter(part_of, requires_grad=whole.requires_grad) if kind == "parameter" else part_of
    piece = store[key]
    if isinstance(piece, nn.Parameter):
        owner.register_parameter(name, piece)
    else:
        owner.register_buffer(name, piece, persistent=_is_persistent(module, target))
    stage.stage_slices[target] = Slice(dim=dim, start=start, size=size, of=whole.shape[dim])


def _owner(stage: nn.Module, target: str, module: nn.Module, used: Collection[str]) -> tuple[nn.Module, str]:
    """The module that holds the target, made if need be: a recurrent one is the model's own, else a bare one.

    A recurrent module lays its weights out for cuDNN whenever it is moved to a device. If the stage does not use
    all its weights, it gets a bare one too.
    """
    *path, name = target.split(".")
    owner = stage
    for depth, part in enumerate(path):
        child = getattr(owner, part, None)
        if child is None:
            place = ".".join(path[: depth + 1])
            original = module.get_submodule(place)
            whole = isinstance(original, nn.RNNBase) and all(
                f"{place}.{own}" in used for own, _ in original.named_parameters()
            )
            child = original if whole else nn.Module()
            owner.add_module(part, child)
        owner = child
    return owner, name


def _is_persistent(module: nn.Module, target: str) -> bool:
    path, _, name = target.rpartition(".")
    owner = module.get_submodule(path)
    return name in owner.state_dict(keep_vars=True)
