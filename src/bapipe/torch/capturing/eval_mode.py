"""A trace made in training mode, as it runs in evaluation: no dropout, batch-norm by its running statistics."""

from __future__ import annotations

import copy
from typing import Any

from torch import fx

from bapipe.torch.capturing.torch_internals import argument_names

__all__ = ["evaluating", "evaluating_region"]

_OFF: dict[str, Any] = {"train": False, "training": False, "dropout_p": 0.0, "use_input_stats": False}
"""arguments of operators that tell training from evaluation, and what they are in evaluation"""


def evaluating(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a traced call as they are in evaluation mode.

    Batch and instance norm that keep no running statistics use the input's in both modes.
    """
    changed, options = list(args), dict(kwargs)
    names = list(argument_names(target))
    if "running_mean" in names:
        place = names.index("running_mean")
        if (args[place] if place < len(args) else options.get("running_mean")) is None:
            return args, kwargs
    for index, name in enumerate(names):
        if name not in _OFF:
            continue
        if index < len(changed):
            changed[index] = _OFF[name]
        elif name in options:
            options[name] = _OFF[name]
    return tuple(changed), options


def evaluating_region(region: fx.GraphModule) -> fx.GraphModule:
    """A copy of a nested graph (autocast, no_grad) in evaluation mode."""
    changed = copy.deepcopy(region)
    for node in changed.graph.nodes:
        if node.op == "call_function":
            node.args, node.kwargs = evaluating(node.target, node.args, node.kwargs)
    changed.recompile()
    for name, child in changed.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(changed, name, evaluating_region(child))
    return changed
