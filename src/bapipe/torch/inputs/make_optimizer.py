"""The plan's optimizer as torch has it."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import nn

from bapipe.costs.optimizers import find_optimizer
from bapipe.errors import BaPipeError

__all__ = ["find_optimizer_class", "make_optimizer"]

Parameters = list[nn.Parameter]

_OPTIMIZERS: dict[str, Callable[[Parameters, float], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate),
    "momentum": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
    "adam": lambda parameters, rate: torch.optim.Adam(parameters, lr=rate),
    "adamw": lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate),
}
"""by the plan's `optimizer`; each changes a parameter by that parameter's gradient alone"""


def make_optimizer(name: str, parameters: Parameters, *, rate: float) -> torch.optim.Optimizer | None:
    """The plan's optimizer over parameters; None where none of them is trained.

    A name such as `torch.optim:RMSprop` is a class, made with its own defaults but for the learning rate.
    """
    make = find_optimizer_class(name)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return make(trained, rate) if trained else None


def find_optimizer_class(name: str) -> Callable[[Parameters, float], torch.optim.Optimizer]:
    """What makes the optimizer of that name; refuses names of nothing, and of what is no optimizer."""
    module, colon, attribute = name.partition(":")
    if not colon:
        find_optimizer(name.lower())
        return _OPTIMIZERS[name.lower()]
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BaPipeError(f"the optimizer '{name[:60]}' cannot be imported: {error}; correct it") from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise BaPipeError(f"'{name[:60]}' is no torch.optim.Optimizer; name a class of one")
    return lambda parameters, rate: found(parameters, lr=rate)  # type: ignore[call-arg]
