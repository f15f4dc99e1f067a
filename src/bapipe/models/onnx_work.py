"""What single ONNX operators compute, move and keep for the backward, per call.

FLOPs are those of matrix products and convolutions alone (2 per multiply-add), as in built-in tables. All else
reads its inputs and writes its outputs once, batch-norm reads twice; views are free. What is kept is what PyTorch
keeps for the same operation, values of shared storage once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from bapipe.errors import BaPipeError
from bapipe.models.onnx_graph import OnnxGraph, OnnxNode

__all__ = ["VIEWS", "NodeWork", "step_work", "trained_inputs"]

VIEWS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Transpose", "Dropout")
"""whose output is their first input in other words; Dropout is, as models are exported for evaluation"""
_FREE = (*VIEWS, "Slice", "Split", "Expand")
_KEEP_OUTPUT = ("Relu", "Sigmoid", "Tanh", "Softmax", "LogSoftmax", "Exp", "Sqrt", "Reciprocal", "LeakyRelu")
_KEEP_NOTHING = (
    "Add", "Sub", "Sum", "Neg", "Mean", "Concat", "Cast", "Pad", "Tile", "Resize", "Upsample", "ReduceSum",
    "ReduceMean", "AveragePool", "GlobalAveragePool", "SpaceToDepth", "DepthToSpace", *_FREE,
)  # fmt: skip
_PRODUCTS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "Einsum")
_LINEAR_IN_EACH = ("Mul", "Div", *_PRODUCTS)
"""an input is kept where another one has a gradient"""
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_RESERVE = 5
"""values that a recurrent layer keeps for each of its outputs, as cuDNN does for an LSTM"""
_INDEX = 2.0
"""elements of 4 bytes in one int64"""
_WEIGHT_PLACES = {"BatchNormalization": 3, "Resize": 1, "Upsample": 1, "LSTM": 4, "GRU": 4, "RNN": 4}
"""inputs that may be trained: the first so many; all of other operators"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWork:
    """One node's work, for as many samples as the graph's shapes are of."""

    flops: float = 0.0
    through_weights: bool = False
    """whether the flops multiply parameters"""
    products: float = 0.0
    """elements read and written by products and gathers, parameters excepted"""
    elementwise: float = 0.0
    kernels: int = 0
    weight_reads: float = 1.0
    kept: tuple[str, ...] = ()
    """values that the backward needs"""
    extra: float = 0.0
    """elements kept besides those"""

    @property
    def heavy(self) -> bool:
        """Whether it is what a layer is about: a product, or a gather from an embedding."""
        return self.flops > 0 or self.weight_reads == 0


def trained_inputs(node: OnnxNode) -> tuple[str, ...]:
    """Inputs at places where parameters count; running statistics, first states and scales of images do not."""
    return tuple(name for name in node.inputs[: _WEIGHT_PLACES.get(node.kind)] if name)


def step_work(graph: OnnxGraph, node: OnnxNode, *, fixed: Collection[str], graded: Collection[str]) -> NodeWork:
    """What a node does. `fixed` values follow from no input, `graded` ones have a gradient."""
    moving = [name for name in node.inputs if name and name not in fixed]
    made = [name for name in node.outputs if name in graph.values]
    inputs = sum(graph.values[name].elements for name in moving)
    outputs = sum(graph.values[name].elements for name in made)
    answered = any(name in graded for name in made)
    if node.kind in _GATES:
        return _recurrent(graph, node, moving, made)
    if node.kind == "Attention":
        return _attention(graph, node, moving, made)
    kept = tuple(_kept(node, moving, made, graded)) if answered else ()
    if node.kind in _PRODUCTS:
        flops = _FLOPS[node.kind](graph, node)
        weights = any(name in fixed for name in node.inputs[:2])
        return NodeWork(flops=flops, through_weights=weights, products=inputs + outputs, kernels=1, kept=kept)
    if node.kind == "Gather" and node.inputs[0] in fixed and node.inputs[0] in graded:
        return NodeWork(products=2 * outputs, weight_reads=0.0, kept=kept)
    if node.kind in _FREE:
        return NodeWork(kept=kept)
    extra = 0.0
    if node.kind == "MaxPool":
        extra = _INDEX * graph.values[node.outputs[0]].elements
    if node.kind == "BatchNormalization":
        inputs *= 2  # for its statistics, and to normalise
    return NodeWork(elementwise=inputs + outputs + extra, kept=kept, extra=extra if answered else 0.0)


def _kept(node: OnnxNode, moving: list[str], made: list[str], graded: Collection[str]) -> list[str]:
    if node.kind in _KEEP_OUTPUT:
        return made[:1]
    if node.kind in _KEEP_NOTHING:
        return []
    if node.kind in _LINEAR_IN_EACH:
        return [
            name
            for name in moving
            if any(other in graded for place, other in enumerate(node.inputs) if node.inputs[place] != name)
            or node.inputs.count(name) > 1
        ]
    if node.kind == "Gather":
        return [name for name in moving if name == node.inputs[1]]
    if node.kind == "Where":
        return [name for name in moving if name == node.inputs[0]]
    return [name for name in moving if name in graded]


def _shape(graph: OnnxGraph, node: OnnxNode, place: int) -> tuple[int, ...]:
    found = graph.values.get(node.inputs[place]) if place < len(node.inputs) else None
    if found is None:
        raise BaPipeError(
            f"the shape of input {place} of {node.kind} '{node.name[:60]}' is not known; export the model again"
        )
    return found.shape


def _made(graph: OnnxGraph, node: OnnxNode) -> int:
    return math.prod(graph.values[node.outputs[0]].shape)


def _conv_flops(graph: OnnxGraph, node: OnnxNode) -> float:
    return 2.0 * _made(graph, node) * math.prod(_shape(graph, node, 1)[1:])


def _transposed_flops(graph: OnnxGraph, node: OnnxNode) -> float:
    return 2.0 * math.prod(_shape(graph, node, 0)) * math.prod(_shape(graph, node, 1)[1:])


def _gemm_flops(graph: OnnxGraph, node: OnnxNode) -> float:
    return 2.0 * _made(graph, node) * _shape(graph, node, 0)[0 if node.attributes.get("transA") else 1]


def _matmul_flops(graph: OnnxGraph, node: OnnxNode) -> float:
    return 2.0 * _made(graph, node) * _shape(graph, node, 0)[-1]


def _einsum_flops(graph: OnnxGraph, node: OnnxNode) -> float:
    text = node.attributes["equation"].decode().replace(" ", "")
    terms = text.partition("->")[0].split(",")
    if "." in text:
        raise BaPipeError(f"Einsum '{node.name[:60]}' has an ellipsis; export the model with MatMul instead")
    sizes: dict[str, int] = {}
    for place, term in enumerate(terms):
        sizes |= dict(zip(term, _shape(graph, node, place), strict=True))
    return 2.0 * math.prod(sizes.values()) if len(terms) > 1 else 0.0


_FLOPS: dict[str, Callable[[OnnxGraph, OnnxNode], float]] = {
    "Conv": _conv_flops,
    "ConvTranspose": _transposed_flops,
    "Gemm": _gemm_flops,
    "MatMul": _matmul_flops,
    "Einsum": _einsum_flops,
}


def _recurrent(graph: OnnxGraph, node: OnnxNode, moving: list[str], made: list[str]) -> NodeWork:
    """An LSTM, GRU or RNN: the recurrent weights are read at every step, those of the input once."""
    hidden, gates = int(node.attributes["hidden_size"]), _GATES[node.kind]
    shape = _shape(graph, node, 0)
    length, features = (shape[1] if node.attributes.get("layout") else shape[0]), shape[2]
    directions = _shape(graph, node, 1)[0]
    batch = math.prod(shape[:2]) // length
    work = float(length * batch * directions)
    return NodeWork(
        flops=2.0 * work * gates * hidden * (features + hidden),
        through_weights=True,
        products=sum(graph.values[name].elements for name in moving) + 9 * work * hidden,
        kernels=length,
        weight_reads=(features + hidden * length) / (features + hidden),
        kept=(node.inputs[0], *made[:1]),
        extra=_RESERVE * work * hidden,
    )


def _attention(graph: OnnxGraph, node: OnnxNode, moving: list[str], made: list[str]) -> NodeWork:
    """Fused attention, which keeps no matrix of queries × keys."""
    query, key = _shape(graph, node, 0), _shape(graph, node, 1)
    heads = query[1] if len(query) == 4 else int(node.attributes["q_num_heads"])
    pairs = query[0] * query[-2] * key[-2]
    width = query[-1] * (query[1] if len(query) == 4 else 1)
    flops = 4.0 * pairs * width * (0.5 if node.attributes.get("is_causal") else 1.0)
    return NodeWork(
        flops=flops,
        products=sum(graph.values[name].elements for name in (*moving, *made[:1])),
        kernels=2,
        kept=(*moving[:3], *made[:1]),
        extra=float(query[0] * heads * query[-2]),
    )
