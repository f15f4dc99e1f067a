"""Which values of a graph may have a gradient."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn

from bapipe.torch.capturing.aliases import Storages, input_nodes
from bapipe.torch.capturing.leaf_modules import OpaqueCall
from bapipe.torch.capturing.torch_internals import op_name

__all__ = ["nodes_with_gradient"]

_NO_GRADIENT = frozenset(
    f"aten.{name}"
    for name in (
        "detach", "detach_", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like",
        "new_zeros", "new_ones", "new_empty", "new_full", "sign", "floor", "ceil", "round",
    )
)  # fmt: skip


def nodes_with_gradient(
    graph: fx.Graph,
    kinds: dict[fx.Node, str],
    module: nn.Module,
    state: dict[fx.Node, str],
    calls: dict[fx.Node, OpaqueCall],
    storages: Storages,
) -> frozenset[fx.Node]:
    """Nodes with a gradient; a tensor that such a value is written into has one too, in all its views."""
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    found: set[fx.Node] = set()
    written: set[fx.Node] = set()

    def depends(node: fx.Node) -> bool:
        inputs = input_nodes((node.args, node.kwargs))
        return any(item in found or not written.isdisjoint(storages.bases[item]) for item in inputs)

    for node in graph.nodes:
        value = node.meta.get("val")
        if kinds.get(node) == "parameter":
            has = state[node] in trained
        elif kinds.get(node) == "input":
            has = isinstance(value, Tensor) and value.requires_grad
        elif node.op != "call_function" or op_name(node.target) in _NO_GRADIENT or _without_grad(node):
            has = False
        else:
            has = _differentiable(value) and depends(node)
            if has:
                written |= storages.writes.get(node, frozenset())
            if node in calls:
                own = module.get_submodule(calls[node].path).parameters()
                has = has or any(parameter.requires_grad for parameter in own)
        if has:
            found.add(node)
    views = (node for node in graph.nodes if _differentiable(node.meta.get("val")))
    return frozenset(found | {node for node in views if not written.isdisjoint(storages.bases[node])})


def _without_grad(node: fx.Node) -> bool:
    return op_name(node.target).endswith("wrap_with_set_grad_enabled") and node.args[0] is False


def _differentiable(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point() or value.is_complex()
    return isinstance(value, (list, tuple)) and any(_differentiable(item) for item in value)
