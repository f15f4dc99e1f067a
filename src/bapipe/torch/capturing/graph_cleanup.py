"""An exported graph without what has no effect, and with the shapes that its kernels return."""

from __future__ import annotations

from torch import fx, nn

from bapipe.torch.capturing.torch_internals import op_name

__all__ = ["clean", "correct_states", "name_is_comparison"]

_ASSERTIONS = ("_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range")


def clean(graph: fx.Graph, owner: nn.Module) -> None:
    """Erase run-time assertions, here and in regions, and nodes without effect."""
    for node in reversed(list(graph.nodes)):
        if node.op == "get_attr" and isinstance(region := getattr(owner, str(node.target), None), fx.GraphModule):
            clean(region.graph, region)
            region.recompile()
        if node.op != "call_function":
            continue
        name = op_name(node.target)
        if any(name.endswith(assertion) or f".{assertion}" in name for assertion in _ASSERTIONS):
            if not node.users:
                graph.erase_node(node)
        elif name in ("operator.getitem", "aten.sym_size") and not node.users:
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        pure = node.op == "call_function" and name_is_comparison(op_name(node.target))
        if pure and not node.users:
            graph.erase_node(node)


def correct_states(graph: fx.Graph) -> None:
    """Give the states that an LSTM returns the shape of those it takes.

    Traced for inference with oneDNN, torch 2.11 adds a dimension to them, which no kernel returns.
    """
    for node in graph.nodes:
        if op_name(node.target) != "aten.lstm" or not isinstance(node.args[1], (list, tuple)):
            continue
        taken = [item.meta["val"] for item in node.args[1]]
        node.meta["val"] = (node.meta["val"][0], *taken)
        for user in node.users:
            if op_name(user.target) == "operator.getitem" and user.args[1]:
                user.meta["val"] = taken[user.args[1] - 1]


def name_is_comparison(name: str) -> bool:
    """Whether a node only compares sizes, for an assertion that is gone."""
    return name in tuple(f"operator.{item}" for item in ("ge", "le", "gt", "lt", "eq", "ne", "and_", "or_"))
