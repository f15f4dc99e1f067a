"""What the planner wants to know of each captured layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor, fx, nn

from bapipe.models.layers import Layer, Split
from bapipe.torch.capturing.aliases import input_nodes
from bapipe.torch.capturing.crossing_values import Value, crossing, value_of
from bapipe.torch.capturing.flops import elements_written
from bapipe.torch.capturing.layer_division import find_rule
from bapipe.torch.capturing.layer_groups import Group
from bapipe.torch.capturing.layer_modules import layer_modules
from bapipe.torch.capturing.linearise import Program
from bapipe.torch.capturing.torch_internals import op_name

__all__ = ["CapturedLayer", "describe_layers", "to_layer"]

_KEEPS_OUTPUT = frozenset(
    f"aten.{name}"
    for name in ("relu", "relu_", "tanh", "sigmoid", "softmax", "log_softmax", "exp", "rsqrt", "sqrt",
                 "max_pool2d", "scaled_dot_product_attention", "lstm", "gru")
)  # fmt: skip
_KEEPS_NOTHING = frozenset(
    f"aten.{name}"
    for name in ("add", "add_", "sub", "neg", "cat", "stack", "sum", "mean", "clone", "to", "pad", "embedding",
                 "relu", "relu_", "tanh", "sigmoid", "softmax", "log_softmax", "exp", "rsqrt", "sqrt", "copy_")
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedLayer:
    """One layer: consecutive steps of the trace."""

    name: str
    kind: str
    """conv, linear, embedding, lstm, attention, block, opaque or other"""
    parameters: tuple[str, ...]
    """the model's own names; of a tied parameter the first"""
    shared: tuple[str, ...]
    """of these, the ones that other layers use too"""
    buffers: tuple[str, ...]
    modules: tuple[str, ...]
    """paths of the innermost modules whose operations it has, in order"""
    parameter_sizes: tuple[int, ...]
    """elements of each parameter"""
    weight_bytes: int
    """of parameters and buffers"""
    trainable_bytes: int
    """of these, of parameters that require a gradient"""
    sent: tuple[Value, ...]
    """values that cross a cut after this layer, skip values included; () after the last"""
    forward_flops: float
    """of products, per sample; a multiply-add counts 2"""
    weight_flops: float
    """of these, the ones that multiply parameters"""
    elementwise_elements: float
    """per sample, written by whatever is no product"""
    saved_elements: float
    """per sample, about what backward keeps, from the formulas of each operator; measure to know"""
    kernels: int
    """products"""
    split: Split | None
    conv: tuple[int, ...] | None
    batch: int
    """samples of the example"""

    @property
    def parameter_count(self) -> int:
        """Elements of all parameters, shared ones included."""
        return sum(self.parameter_sizes)


def describe_layers(program: Program, module: nn.Module, groups: Sequence[Group]) -> tuple[CapturedLayer, ...]:
    """Describe every layer."""
    first = {id(tensor): name for name, tensor in reversed([*module.named_parameters(), *module.named_buffers()])}
    uses = [_state(program, module, group, first) for group in groups]
    holders: dict[str, int] = {}
    for parameters, _ in uses:
        for name in parameters:
            holders[name] = holders.get(name, 0) + 1
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    found = []
    modules = layer_modules(program, module, groups)
    for group, (parameters, buffers), paths in zip(groups, uses, modules, strict=True):
        steps = program.steps[group.start : group.stop]
        anchors = [program.steps[position] for position in group.anchors]
        heavy = [node for node in steps if program.products[node]]
        found.append(
            CapturedLayer(
                name=group.name,
                kind=_kind(program, anchors, heavy, "att" in group.name.lower()),
                parameters=parameters,
                shared=tuple(name for name in parameters if holders[name] > 1),
                buffers=buffers,
                modules=paths,
                parameter_sizes=tuple(tensors[name].numel() for name in parameters),
                weight_bytes=sum(tensors[name].nbytes for name in (*parameters, *buffers)),
                trainable_bytes=sum(tensors[name].nbytes for name in parameters if tensors[name].requires_grad),
                sent=tuple(value_of(program, node) for node in crossing(program, group.stop)),
                forward_flops=sum(program.products[node] for node in heavy) / program.batch,
                weight_flops=sum(program.products[node] for node in anchors) / program.batch,
                elementwise_elements=sum(
                    elements_written(node, program.sizes) for node in steps if not program.products[node]
                )
                / program.batch,
                saved_elements=_saved_elements(program, steps) / program.batch,
                kernels=max(1, len(heavy)),
                split=_split(program, group),
                conv=_conv(program, anchors),
                batch=program.batch,
            )
        )
    return tuple(found)


def _state(
    program: Program, module: nn.Module, group: Group, first: dict[int, str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the parameters and buffers that a layer's steps use, be it through free nodes."""
    parameters: dict[str, None] = {}
    buffers: dict[str, None] = {}
    seen: set[fx.Node] = set()
    waiting = list(reversed(program.steps[group.start : group.stop]))
    inside = set(waiting)
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        kind = program.kinds[node]
        if kind == "parameter":
            parameters[program.state[node]] = None
        elif kind == "buffer":
            buffers[program.state[node]] = None
        elif node in inside or (kind == "free" and op_name(node.target) != "aten.sym_size"):
            waiting.extend(reversed(list(input_nodes((node.args, node.kwargs)))))
        if node in program.calls:
            whole = module.get_submodule(program.calls[node].path)
            parameters.update({first[id(tensor)]: None for tensor in whole.parameters()})
            buffers.update({first[id(tensor)]: None for tensor in whole.buffers()})
    return tuple(parameters), tuple(buffers)


def _kind(program: Program, anchors: Sequence[fx.Node], heavy: Sequence[fx.Node], named: bool) -> str:
    names = {op_name(node.target).removeprefix("aten.") for node in anchors}
    if any(node in program.calls for node in anchors):
        return "opaque"
    products = {op_name(node.target) for node in heavy}
    if "aten.scaled_dot_product_attention" in products or (named and products & {"aten.bmm", "aten.matmul"}):
        return "attention"
    if names and names <= {"embedding", "embedding_bag"}:
        return "embedding"
    if names & {"lstm", "gru", "rnn_tanh", "rnn_relu"}:
        return "lstm"
    if len(anchors) == 1:
        return "conv" if next(iter(names)).startswith("conv") else "linear"
    return "block" if anchors else "other"


def _split(program: Program, group: Group) -> Split | None:
    rule = find_rule(program, group)
    return None if rule is None else Split(channels=rule.channels, by=rule.by)


def _shape(program: Program, argument: Any) -> tuple[int, ...]:
    value = argument.meta.get("val") if isinstance(argument, fx.Node) else None
    return program.sizes(value) if isinstance(value, Tensor) else ()


def _conv(program: Program, anchors: Sequence[fx.Node]) -> tuple[int, ...] | None:
    if len(anchors) != 1 or op_name(anchors[0].target) != "aten.conv2d":
        return None
    weight, output = _shape(program, anchors[0].args[1]), _shape(program, anchors[0])
    return (weight[1], weight[0], weight[2], output[-2], output[-1]) if len(output) >= 3 else None


def _saved_elements(program: Program, steps: Sequence[fx.Node]) -> float:
    kept: set[fx.Node] = set()
    extra = 0.0
    for node in steps:
        if node not in program.gradients:
            continue
        name = op_name(node.target)
        if name in _KEEPS_OUTPUT:
            kept |= program.storages.bases[node]
        if name == "aten.lstm":
            extra += 5.0 * _elements(program, node)
        if elements_written(node, program.sizes) and name not in _KEEPS_NOTHING:
            for item in input_nodes((node.args, node.kwargs)):
                if program.kinds[item] in ("step", "input"):
                    kept |= program.storages.bases[item]
    return extra + sum(_elements(program, node) for node in kept if program.kinds[node] in ("step", "input"))


def _elements(program: Program, node: fx.Node) -> float:
    value = node.meta.get("val")
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return float(prod(program.sizes(value))) if isinstance(value, Tensor) else 0.0


def to_layer(layer: CapturedLayer, before: Sequence[CapturedLayer]) -> Layer:
    """A layer of the planner's table; one whose parameters all stand in an earlier layer shares that one's."""
    own = set(layer.parameters)
    holder = next((item.name for item in before if own and own <= set(item.parameters)), None)
    taken = {name for item in before for name in item.parameters}
    count = layer.parameter_count
    if holder is None:
        sizes = zip(layer.parameters, layer.parameter_sizes, strict=True)
        count = sum(size for name, size in sizes if name not in taken)
    batch = layer.batch
    per_sample = sum(value.elements(batch) for value in layer.sent) / batch
    errors = sum(value.elements(batch) for value in layer.sent if value.requires_grad) / batch
    return Layer(
        name=layer.name,
        kind=layer.kind,
        forward_flops=layer.forward_flops,
        parameters=count,
        output_elements=per_sample,
        saved_elements=layer.saved_elements,
        error_elements=errors,
        elementwise_elements=layer.elementwise_elements,
        weight_flops=layer.weight_flops,
        weight_reads=0.0 if layer.kind == "embedding" else 1.0,
        kernels=layer.kernels,
        shares_weights_with=holder,
        split=layer.split,
        conv=layer.conv,
    )
