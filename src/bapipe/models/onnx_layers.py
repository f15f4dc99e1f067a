"""An ONNX graph -> the layers that a pipeline may be cut between.

A layer is about one or several products. Between two of them there is one place to cut, the one that least
crosses, of equals the last; and it is taken where one value with a gradient crosses (values without one, such as
masks, come along), or, where branches stay open for long (an encoder's output, the skips of a U-Net), where less
crosses than at the places beside it. Nodes in between belong to the layer that they follow.

    conv relu pool | conv relu | gemm               a chain: every product is a layer
    norm q k v scores softmax … o add | norm up gelu down add |       a transformer: two layers a block

What needs the inputs of the model gets them from the data, so they cross no cut. What follows from weights alone
is not computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from bapipe.errors import BaPipeError
from bapipe.models.layers import Layer, Model, Split
from bapipe.models.onnx_graph import OnnxGraph, OnnxNode
from bapipe.models.onnx_work import VIEWS, NodeWork, step_work, trained_inputs

__all__ = ["onnx_model"]

_LOSS_PASSES = 3
"""over the outputs by the loss, whose log-probabilities are kept, as of built-in tables"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _RunningGraph:
    """What a graph computes when it runs."""

    nodes: list[OnnxNode]
    steps: list[NodeWork]
    reads: list[frozenset[str]]
    """parameters of each node"""
    storage: dict[str, str]
    """value -> the value whose storage it is a view of"""
    first: dict[str, int]
    """storage -> the node that makes it; inputs of the model are not in it"""
    last: dict[str, int]
    """storage -> the last node that reads it"""
    graded: set[str]


def onnx_model(graph: OnnxGraph) -> Model:
    """The layers of a graph, with the sizes of one sample."""
    work = _work(graph)
    heavy = [index for index, step in enumerate(work.steps) if step.heavy]
    if not heavy:
        raise BaPipeError(f"{graph.name[:60]} has no convolution or matrix product; there is nothing to plan")
    crossing = _crossing(graph, work)
    ends = [*_ends(heavy, crossing), len(work.nodes) - 1]
    starts = [0, *(end + 1 for end in ends[:-1])]
    layers: list[Layer] = []
    owners: dict[str, str] = {}
    for start, end in zip(starts, ends, strict=True):
        name = _name(work, start, end, taken=[layer.name for layer in layers])
        last = end == ends[-1]
        layers.append(_layer(graph, work, start, end, name=name, crossing=None if last else crossing[end]))
        own = frozenset().union(*work.reads[start : end + 1])
        _share(graph, layers, own, owners)
    inputs = sum(graph.values[name].elements for name in graph.inputs) / graph.batch
    return Model(
        name=graph.name,
        layers=tuple(layers),
        input_elements=inputs,
        description=f"ONNX graph of {len(graph.nodes)} nodes; the loss is added, dropout is not in it",
    )


def _work(graph: OnnxGraph) -> _RunningGraph:
    """Sort out what follows from weights and shapes alone, and weigh the rest."""
    fixed: dict[str, frozenset[str]] = {
        name: frozenset({name} & graph.parameters.keys()) for name in graph.constants
    }
    graded: set[str] = set()
    nodes: list[OnnxNode] = []
    steps: list[NodeWork] = []
    reads: list[frozenset[str]] = []
    storage: dict[str, str] = {}
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for node in graph.nodes:
        given = [name for name in node.inputs if name]
        if node.kind in ("Shape", "Size") or all(name in fixed for name in given):
            behind = frozenset[str]() if node.kind in ("Shape", "Size") else _behind(fixed, given)
            fixed |= dict.fromkeys(node.outputs, behind)
            continue
        weights = _behind(fixed, trained_inputs(node))
        graded |= {name for name in trained_inputs(node) if fixed.get(name)}
        if weights or any(name in graded for name in given):
            graded |= {name for name in node.outputs if name in graph.values and graph.values[name].floating}
        index = len(nodes)
        for name in given:
            if name not in fixed:
                last[storage.get(name, name)] = index
        for name in node.outputs:
            if node.kind in VIEWS and node.inputs[0] not in fixed:
                storage[name] = storage.get(node.inputs[0], node.inputs[0])
            elif name in graph.values:
                first[name] = index
        nodes.append(node)
        steps.append(step_work(graph, node, fixed=fixed, graded=graded))
        reads.append(weights)
    for name in graph.outputs:
        if name not in fixed:
            last[storage.get(name, name)] = len(nodes)
    return _RunningGraph(
        nodes=nodes, steps=steps, reads=reads, storage=storage, first=first, last=last, graded=graded
    )


def _behind(fixed: dict[str, frozenset[str]], names: Iterable[str]) -> frozenset[str]:
    """Parameters that values follow from."""
    return frozenset().union(*(fixed.get(name, frozenset()) for name in names))


@dataclass(frozen=True, slots=True, kw_only=True)
class _CutMessage:
    """What a cut after a node would send, per sample."""

    elements: float
    graded_elements: float
    graded_values: int


def _crossing(graph: OnnxGraph, work: _RunningGraph) -> list[_CutMessage]:
    changes: list[list[tuple[int, str]]] = [[] for _ in range(len(work.nodes) + 1)]
    for name, made in work.first.items():
        until = work.last.get(name, made)
        if until > made:
            changes[made].append((1, name))
            changes[until].append((-1, name))
    found = []
    elements = graded_elements = 0.0
    count = 0
    for index in range(len(work.nodes)):
        for sign, name in changes[index]:
            size = sign * graph.values[name].elements / graph.batch
            elements += size
            if name in work.graded:
                graded_elements += size
                count += sign
        found.append(_CutMessage(elements=elements, graded_elements=graded_elements, graded_values=count))
    return found


def _ends(heavy: Sequence[int], crossing: Sequence[_CutMessage]) -> list[int]:
    """The last node of every layer but the last."""
    places = [
        min(range(one, other), key=lambda index: (crossing[index].elements, -index))
        for one, other in itertools.pairwise(heavy)
    ]
    sizes = [crossing[place].elements for place in places]
    return [
        place
        for index, place in enumerate(places)
        if crossing[place].graded_values <= 1 or _is_valley(sizes, index)
    ]


def _is_valley(sizes: Sequence[float], index: int) -> bool:
    """Whether the nearest sizes that differ are larger on both sides; beyond the ends nothing crosses."""
    before = next((size for size in reversed(sizes[:index]) if size != sizes[index]), 0.0)
    after = next((size for size in sizes[index + 1 :] if size != sizes[index]), 0.0)
    return min(before, after) > sizes[index]


def _layer(
    graph: OnnxGraph, work: _RunningGraph, start: int, end: int, *, name: str, crossing: _CutMessage | None
) -> Layer:
    """Nodes start … end as a layer; the last one, of which `crossing` is None, has the loss."""
    steps = work.steps[start : end + 1]
    samples = graph.batch
    sizes = graph.values
    kept = {work.storage.get(value, value) for step in steps for value in step.kept}
    later = {work.storage.get(value, value) for step in work.steps[end + 1 :] for value in step.kept}
    # What leaves the layer is counted where it arrives, if it is kept there.
    own = [value for value in kept if not (value in later and start <= work.first.get(value, -1) <= end)]
    saved = sum(sizes[value].elements for value in own) + sum(step.extra for step in steps)
    products = sum(step.products for step in steps)
    elementwise = sum(step.elementwise for step in steps)
    flops = sum(step.flops for step in steps)
    if crossing is None:
        outputs = sum(sizes[value].elements for value in graph.outputs if value in sizes) / samples
        loss = next((sizes[value] for value in graph.outputs if value in work.graded), None)
        if loss is not None and len(loss.shape) > 0:
            saved += loss.elements
            elementwise += _LOSS_PASSES * loss.elements
        errors = outputs
    else:
        outputs, errors = crossing.elements, crossing.graded_elements
    weights = frozenset().union(*work.reads[start : end + 1])
    conv = _convolution(graph, work, start, end)
    return Layer(
        name=name,
        kind=_kind(work, start, end),
        forward_flops=flops / samples,
        parameters=sum(graph.parameters[item] for item in weights),
        output_elements=outputs,
        saved_elements=saved / samples,
        moved_elements=(products + elementwise) / samples,
        elementwise_elements=elementwise / samples,
        error_elements=None if errors == outputs else errors,
        weight_flops=sum(step.flops for step in steps if step.through_weights) / samples,
        weight_reads=_weight_reads(graph, work, start, end),
        kernels=max(1, sum(step.kernels for step in steps)),
        split=None if conv is None or conv[1] < 2 else Split(channels=conv[1]),
        conv=conv,
    )


def _weight_reads(graph: OnnxGraph, work: _RunningGraph, start: int, end: int) -> float:
    """The mean over the parameters; each node reads its own as its kind does."""
    read = total = 0.0
    for step, names in zip(work.steps[start : end + 1], work.reads[start : end + 1], strict=True):
        size = sum(graph.parameters[name] for name in names)
        read += step.weight_reads * size
        total += size
    return read / total if total else 1.0


def _convolution(graph: OnnxGraph, work: _RunningGraph, start: int, end: int) -> tuple[int, ...] | None:
    """(input channels, output channels, kernel, height, width) of a layer of one square convolution or linear."""
    heavy = [index for index in range(start, end + 1) if work.steps[index].heavy]
    if len(heavy) != 1 or not work.steps[heavy[0]].through_weights:
        return None
    node = work.nodes[heavy[0]]
    weight, made = graph.values[node.inputs[1]].shape, graph.values[node.outputs[0]].shape
    if (
        node.kind == "Conv"
        and len(weight) == 4
        and weight[2] == weight[3]
        and node.attributes.get("group", 1) == 1
    ):
        return (weight[1], weight[0], weight[2], made[2], made[3])
    if node.kind in ("Gemm", "MatMul") and len(weight) == 2 and len(made) == 2 and made[0] == graph.batch:
        outputs = made[1]
        return (weight[0] * weight[1] // outputs, outputs, 1, 1, 1)
    return None


_KINDS = {"Conv": "conv", "ConvTranspose": "conv", "Gemm": "linear", "MatMul": "linear", "Einsum": "linear",
          "LSTM": "lstm", "GRU": "gru", "RNN": "rnn", "Gather": "embedding", "Attention": "attention"}  # fmt: skip


def _kind(work: _RunningGraph, start: int, end: int) -> str:
    heavy = [index for index in range(start, end + 1) if work.steps[index].heavy]
    if any(work.steps[index].flops > 0 and not work.steps[index].through_weights for index in heavy):
        return "attention"
    found = {_KINDS[work.nodes[index].kind] for index in heavy}
    return found.pop() if len(found) == 1 else "block"


def _name(work: _RunningGraph, start: int, end: int, *, taken: Sequence[str]) -> str:
    """The module that its products are of, as far as paths agree: of the nodes, or of the weights they read."""
    heavy = [index for index in range(start, end + 1) if work.steps[index].heavy] or [start]
    paths = [work.nodes[index].module.split(".") for index in heavy]
    if not all(map(any, paths)):
        paths = [name.split(".")[:-1] for index in heavy for name in sorted(work.reads[index]) if "." in name]
    agreeing = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))
    found = ".".join(parts[0] for parts in agreeing) or work.nodes[heavy[0]].name.strip("/").replace("/", ".")
    number, name = 1, found
    while name in taken:
        number += 1
        name = f"{found}-{number}"
    return name


def _share(graph: OnnxGraph, layers: list[Layer], weights: frozenset[str], owners: dict[str, str]) -> None:
    """Say of the last layer with whom it shares its weights; what else it has goes to the one before it."""
    layer = layers[-1]
    shared = {name for name in weights if name in owners}
    held = sum(graph.parameters[name] for name in shared)
    if 2 * held > layer.parameters:
        owner = owners[max(shared, key=lambda name: graph.parameters[name])]
        rest = layer.parameters - held
        layers[-1] = replace(layer, parameters=held, shares_weights_with=owner)
        layers[-2] = replace(layers[-2], parameters=layers[-2].parameters + rest)
    for name in weights:
        owners.setdefault(name, layer.name)
