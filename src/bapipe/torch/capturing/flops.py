"""Floating-point operations of traced nodes: products exactly, everything else one per element it writes."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from torch import Tensor, fx

from bapipe.torch.capturing.torch_internals import op_name

__all__ = ["FREE", "Sizes", "elements_written", "product_flops"]

Sizes = Callable[[Tensor], tuple[int, ...]]

FREE = frozenset(
    f"aten.{name}"
    for name in (
        "view", "reshape", "_unsafe_view", "expand", "expand_as", "permute", "transpose", "t", "slice", "select",
        "unsqueeze", "squeeze", "split", "split_with_sizes", "chunk", "unbind", "detach", "alias", "flatten",
        "unflatten", "narrow", "movedim", "swapaxes", "view_as", "as_strided", "unfold", "diagonal", "numpy_T",
        "contiguous", "to", "sym_size", "lift_fresh_copy", "detach_",
    )
)  # fmt: skip
"""operators that only look at a tensor in another way (or copy it as it is)"""


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def _shape(argument: Any, sizes: Sizes) -> tuple[int, ...]:
    value = _value(argument)
    return sizes(value) if isinstance(value, Tensor) else ()


def _first_output(node: fx.Node) -> Any:
    value = node.meta.get("val")
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
    return value


def product_flops(node: fx.Node, sizes: Sizes) -> float:
    """Operations of the node's matrix products; a multiply-add counts 2. 0 for whatever is none."""
    name = op_name(node.target).removeprefix("aten.")
    args = node.args
    output = _first_output(node)
    if not isinstance(output, Tensor):
        return 0.0
    written = float(prod(sizes(output)))
    if name in ("linear", "matmul", "mm", "bmm", "mv", "dot", "_grouped_mm", "grouped_mm"):
        left = _shape(args[0], sizes)
        return 2.0 * written * (left[-1] if left else 1)
    if name in ("addmm", "baddbmm", "addbmm", "addmv"):
        return 2.0 * written * _shape(args[1], sizes)[-1]
    if name in ("conv1d", "conv2d", "conv3d", "convolution"):
        return 2.0 * written * prod(_shape(args[1], sizes)[1:])
    if name.startswith("conv_transpose"):
        return 2.0 * prod(_shape(args[0], sizes)) * prod(_shape(args[1], sizes)[1:])
    if name == "scaled_dot_product_attention":
        key, value = _shape(args[1], sizes), _shape(args[2], sizes)
        return 2.0 * prod(_shape(args[0], sizes)) * key[-2] + 2.0 * written * value[-2]
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return _recurrent(node, sizes)
    if name == "einsum":
        return _einsum(node, sizes)
    return 0.0


def _recurrent(node: fx.Node, sizes: Sizes) -> float:
    weights = next((item for item in node.args[2:] if isinstance(item, (list, tuple))), ())
    matrices = [shape for shape in (_shape(item, sizes) for item in weights) if len(shape) == 2]
    source = _shape(node.args[0], sizes)
    steps = prod(source[:-1])
    return 2.0 * steps * sum(prod(shape) for shape in matrices)


def _einsum(node: fx.Node, sizes: Sizes) -> float:
    equation, operands = node.args[0], node.args[1]
    if not isinstance(equation, str) or not isinstance(operands, (list, tuple)) or len(operands) < 2:
        return 0.0
    extents: dict[str, int] = {}
    for term, operand in zip(equation.replace(" ", "").split("->")[0].split(","), operands, strict=False):
        shape = _shape(operand, sizes)
        letters = term.replace("...", "." * (len(shape) - len(term.replace("...", ""))))
        for position, letter in enumerate(letters):
            key = f".{len(letters) - position}" if letter == "." else letter
            extents[key] = max(extents.get(key, 1), shape[position])
    return 2.0 * prod(extents.values())


def elements_written(node: fx.Node, sizes: Sizes) -> float:
    """Elements of the node's outputs; 0 for views."""
    if op_name(node.target) in FREE or op_name(node.target) == "operator.getitem":
        return 0.0
    return float(_count(node.meta.get("val"), sizes))


def _count(value: Any, sizes: Sizes) -> int:
    if isinstance(value, Tensor):
        return prod(sizes(value))
    if isinstance(value, (list, tuple)):
        return sum(_count(item, sizes) for item in value)
    return 0
