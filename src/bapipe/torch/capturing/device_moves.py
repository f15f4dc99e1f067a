"""Traces that were made on one device and run on another."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx

from bapipe.torch.capturing.torch_internals import op_name

__all__ = ["moved_region", "on_device"]


def moved_region(region: fx.GraphModule, devices: tuple[torch.device, torch.device] | None) -> fx.GraphModule:
    """A region's graph for another device than it was traced on."""
    if devices is None:
        return region
    moved = copy.deepcopy(region)
    for node in moved.graph.nodes:
        if node.op == "call_function":
            node.args, node.kwargs = on_device(node.target, node.args, node.kwargs, devices)
    moved.recompile()
    for name, child in moved.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(moved, name, moved_region(child, devices))
    return moved


def on_device(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], devices: tuple[torch.device, torch.device]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with the traced device replaced; an autocast region names it by its type."""
    old, new = devices
    args = tuple(new if isinstance(item, torch.device) and item == old else item for item in args)
    kwargs = {key: new if isinstance(item, torch.device) and item == old else item for key, item in kwargs.items()}
    if op_name(target).endswith("wrap_with_autocast") and args and args[0] == old.type:
        args = (new.type, *args[1:])
    return args, kwargs
