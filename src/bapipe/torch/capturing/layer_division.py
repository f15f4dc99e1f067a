"""How a layer divides between stages: which of its steps see a slice, and along which dimension.

    x ── linear(W) ── relu ── dropout ── y        whole
    x ── linear(W[:c]) ── relu ── dropout ── y₁   the first channels; the stage sends x and y₁
    x ── linear(W[c:]) ── relu ── dropout ── y₂   the rest; y = y₁ ⧺ y₂

Channel-wise followers run on the slice, with slices of their own weights. Before a cross-entropy the classes
divide: only each part's log-sum-exp and the logit of the target cross. An LSTM divides by direction or by time
steps, since h(t−1) needs every unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor, fx

from bapipe.errors import BaPipeError
from bapipe.torch.capturing.aliases import input_nodes
from bapipe.torch.capturing.layer_groups import Group
from bapipe.torch.capturing.linearise import Program
from bapipe.torch.capturing.torch_internals import op_name

__all__ = ["PartRule", "StepRule", "find_rule", "required_rule"]

_SAME = frozenset(
    f"aten.{name}"
    for name in (
        "relu", "relu_", "gelu", "silu", "silu_", "tanh", "tanh_", "sigmoid", "sigmoid_", "leaky_relu",
        "leaky_relu_", "elu", "elu_", "hardtanh", "hardtanh_", "hardswish", "hardswish_", "mish", "softplus",
        "add", "add_", "mul", "mul_", "to", "_to_copy", "clone", "contiguous", "alias",
    )
)  # fmt: skip
"""element by element"""
_POOLS = frozenset(
    f"aten.{name}"
    for name in (
        "max_pool2d",
        "avg_pool2d",
        "adaptive_avg_pool2d",
        "pad",
        "constant_pad_nd",
    )
)
"""channel by channel, over the last two dimensions"""
_DROPOUTS = frozenset(f"aten.{name}" for name in ("dropout", "dropout_", "feature_dropout"))
_RESHAPES = frozenset(f"aten.{name}" for name in ("view", "reshape", "flatten", "_unsafe_view"))
_CONVOLUTIONS = frozenset(f"aten.{name}" for name in ("conv1d", "conv2d", "conv3d"))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRule:
    """One step that sees a slice."""

    kind: str
    """plain, dropout, reshape, loss or lstm"""
    dim: int
    """of its output, along which that is a slice; of a reshape also the entry of its sizes that shrinks"""
    slices: dict[fx.Node, int]
    """inputs that have all channels, and the dimension to slice them along"""
    full: tuple[int, ...] = ()
    """shape of the whole output at the example's batch"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRule:
    """How a layer divides."""

    by: str
    """output channels, vocabulary, directions or time steps"""
    channels: int
    steps: dict[fx.Node, StepRule]
    """in order; all other steps of the layer run whole on every part"""
    anchor: fx.Node
    """its (first) weighted step"""
    output: fx.Node
    """the layer's only result"""
    dim: int
    """of the output, along which the parts are put together"""


def find_rule(program: Program, group: Group) -> PartRule | None:
    """How a layer divides; None where its channels mix, or more than one value leaves it."""
    steps = program.steps[group.start : group.stop]
    anchors = [program.steps[position] for position in group.anchors]
    outputs = _outputs(program, group)
    if not anchors or len(outputs) != 1 or any(node in program.calls for node in anchors):
        return None
    names = {op_name(node.target) for node in anchors}
    if names == {"aten.lstm"}:
        return _lstm_rule(program, anchors, steps, outputs[0])
    if len(anchors) > 1 and names != {"aten.embedding"}:
        return None
    channels = {_channels(program, node) for node in anchors}
    if len(channels) != 1 or None in channels:
        return None
    count = channels.pop()
    assert count is not None
    found: dict[fx.Node, StepRule] = {}
    for node in steps[min(steps.index(anchor) for anchor in anchors) :]:
        if node in anchors:
            found[node] = _anchor_rule(program, node)
        elif any(item in found for item in input_nodes((node.args, node.kwargs))):
            rule = _follower_rule(program, node, found)
            if rule is None:
                return None
            found[node] = rule
    last = found.get(outputs[0])
    if last is None:
        return None
    by = "vocabulary" if last.kind == "loss" else "output channels"
    if any(rule.kind == "loss" for node, rule in found.items() if node is not outputs[0]):
        return None
    return PartRule(by=by, channels=count, steps=found, anchor=anchors[0], output=outputs[0], dim=last.dim)


def required_rule(program: Program, group: Group) -> PartRule:
    """As `find_rule`, for a layer that a plan splits."""
    rule = find_rule(program, group)
    if rule is None:
        raise BaPipeError(f"layer '{group.name}' cannot be split; plan without --split-layers")
    return rule


def _outputs(program: Program, group: Group) -> list[fx.Node]:
    """Values made in the layer that are used after it."""
    returned = {item for item in program.outputs if isinstance(item, fx.Node)}
    return [
        node
        for node in program.steps[group.start : group.stop]
        if node in returned
        or any(program.position.get(user, -1) >= group.stop for user in program.users.get(node, ()))
    ]


def _shape(program: Program, node: Any) -> tuple[int, ...]:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return program.sizes(value) if isinstance(value, Tensor) else ()


def _is_state(program: Program, node: Any) -> bool:
    return isinstance(node, fx.Node) and program.kinds.get(node) in ("parameter", "buffer")


def _channels(program: Program, node: fx.Node) -> int | None:
    """Output channels of a weighted step whose weights are the model's own; None: it does not divide."""
    name, args = op_name(node.target), node.args
    weight = args[0] if name == "aten.embedding" else args[1] if len(args) > 1 else None
    bias = args[2] if name != "aten.embedding" and len(args) > 2 else None
    if not _is_state(program, weight) or not (bias is None or _is_state(program, bias)):
        return None
    shape = _shape(program, weight)
    if name == "aten.embedding":
        count = shape[1]
    elif name == "aten.linear" or (name in _CONVOLUTIONS and (len(args) < 7 or args[6] == 1)):
        count = shape[0]
    else:
        return None
    return count if count >= 2 else None


def _anchor_rule(program: Program, node: fx.Node) -> StepRule:
    name, full = op_name(node.target), _shape(program, node)
    if name == "aten.embedding":
        weight = node.args[0]
        assert isinstance(weight, fx.Node)
        return StepRule(kind="plain", dim=len(full) - 1, slices={weight: 1}, full=full)
    slices = {item: 0 for item in node.args[1:3] if isinstance(item, fx.Node)}
    dim = len(full) - 1 if name == "aten.linear" else 1
    return StepRule(kind="plain", dim=dim, slices=slices, full=full)


def _follower_rule(program: Program, node: fx.Node, known: dict[fx.Node, StepRule]) -> StepRule | None:
    name, full = op_name(node.target), _shape(program, node)
    inputs = list(input_nodes((node.args, node.kwargs)))
    before = next(item for item in inputs if item in known)
    rule = known[before]
    if rule.kind == "loss":
        return None
    if name == "aten.cross_entropy_loss":
        return _loss_rule(node, before, rule, inputs)
    if name == "aten.batch_norm" and rule.dim == 1:
        state = {item: 0 for item in node.args[1:5] if isinstance(item, fx.Node)}
        return StepRule(kind="plain", dim=1, slices=state, full=full)
    if name in _DROPOUTS:
        return StepRule(kind="dropout", dim=rule.dim, slices={}, full=full)
    if name in _POOLS:
        return StepRule(kind="plain", dim=rule.dim, slices={}, full=full) if rule.dim == len(full) - 3 else None
    if name in _RESHAPES:
        return _reshape_rule(_shape(program, before), full, rule.dim)
    if name == "aten.transpose":
        return _transpose_rule(node, rule.dim, full)
    if name not in _SAME:
        return None
    dim = rule.dim + len(full) - len(_shape(program, before))
    slices: dict[fx.Node, int] = {}
    for item in inputs:
        shape = _shape(program, item)
        place = dim + len(shape) - len(full)
        if item in known:
            if known[item].dim != place or known[item].kind == "loss":
                return None
        elif place >= 0 and shape and shape[place] == full[dim]:
            slices[item] = place
        elif place >= 0 and shape and shape[place] != 1:
            return None
    return StepRule(kind="plain", dim=dim, slices=slices, full=full)


def _loss_rule(node: fx.Node, before: fx.Node, rule: StepRule, inputs: Sequence[fx.Node]) -> StepRule | None:
    """Cross-entropy over classes in the second of two dimensions, without weights of classes."""
    weighted = len(node.args) > 2 and node.args[2] is not None
    reduction = node.args[3] if len(node.args) > 3 else 1
    if node.args[0] is not before or weighted or reduction not in (1, 2):
        return None
    if len(rule.full) != 2 or rule.dim != 1 or len(inputs) != 2:
        return None
    return StepRule(kind="loss", dim=0, slices={})


def _reshape_rule(before: tuple[int, ...], after: tuple[int, ...], dim: int) -> StepRule | None:
    """Where the sliced dimension goes: it may take in what follows it, but nothing may come before it."""
    ahead, own = prod(before[:dim]), before[dim]
    for place, size in enumerate(after):
        if prod(after[:place]) == ahead and size % own == 0:
            return StepRule(kind="reshape", dim=place, slices={}, full=after)
    return None


def _transpose_rule(node: fx.Node, dim: int, full: tuple[int, ...]) -> StepRule | None:
    one, two = (int(item) % len(full) for item in node.args[1:3])  # type: ignore[arg-type]
    return StepRule(kind="plain", dim={one: two, two: one}.get(dim, dim), slices={}, full=full)


def _lstm_rule(
    program: Program, anchors: Sequence[fx.Node], steps: Sequence[fx.Node], output: fx.Node
) -> PartRule | None:
    """By direction where there are two, else by time steps; of one layer whose output alone is used."""
    if len(anchors) != 1:
        return None
    lstm = anchors[0]
    if len(lstm.args) < 9 or not isinstance(lstm.args[1], (list, tuple)):
        return None
    _, _, weights, _, layers, dropout, _, both_ways, batch_first = lstm.args[:9]
    after = list(steps[steps.index(lstm) + 1 :])
    taken = [node for node in after if op_name(node.target) == "operator.getitem" and node.args[0] is lstm]
    if layers != 1 or dropout or len(taken) != 1 or taken[0].args[1] != 0:
        return None
    if not isinstance(weights, (list, tuple)) or not all(_is_state(program, item) for item in weights):
        return None
    full = _shape(program, taken[0])
    dim = len(full) - 1 if both_ways else 1 if batch_first else 0
    found = {node: StepRule(kind="lstm", dim=dim, slices={}, full=full) for node in (lstm, taken[0])}
    for node in after:
        if node is not taken[0] and any(item in found for item in input_nodes((node.args, node.kwargs))):
            rule = _follower_rule(program, node, found)
            if rule is None or rule.kind == "loss":
                return None
            found[node] = rule
    channels = 2 if both_ways else full[dim]
    if output not in found or output is lstm or channels < 2:
        return None
    by = "directions" if both_ways else "time steps"
    return PartRule(by=by, channels=channels, steps=found, anchor=lstm, output=output, dim=found[output].dim)
