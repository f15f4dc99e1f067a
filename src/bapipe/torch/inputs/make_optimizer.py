"""The plan's optimizer as torch has it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bapipe.costs.optimizers import OptimizerSpec, find_optimizer, parse_optimizer
from bapipe.errors import BaPipeError, first_line
from bapipe.torch.inputs.master_weights import MasterWeights

__all__ = ["make_optimizer", "require_optimizer"]

Parameters = list[nn.Parameter]

_OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
}
"""by the plan's `optimizer`, with options; each changes a parameter by that parameter's gradient alone"""


def make_optimizer(text: str, parameters: Parameters, *, rate: float) -> torch.optim.Optimizer | None:
    """The plan's optimizer over parameters; None where none of them is trained.

    A name such as `torch.optim:RMSprop` is a class. What the text has in brackets are options of the class, which
    has its own defaults otherwise; `master_weights=true` puts it over fp32 copies of the parameters.
    """
    spec = parse_optimizer(text)
    make = _maker(spec)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return None
    if spec.master_weights:
        return MasterWeights(trained, lambda masters: make(masters, rate))
    return make(trained, rate)


def require_optimizer(text: str) -> None:
    """Refuse names of nothing, and of what is no optimizer; and options that its class does not take."""
    _maker(parse_optimizer(text))([nn.Parameter(torch.zeros(1))], 0.0)


def _maker(spec: OptimizerSpec) -> Callable[[Parameters, float], torch.optim.Optimizer]:
    found, usual = _class_of(spec.name)

    def make(parameters: Parameters, rate: float) -> torch.optim.Optimizer:
        try:
            return found(parameters, lr=rate, **{**usual, **spec.options})
        except (TypeError, ValueError, RuntimeError) as error:
            raise BaPipeError(
                f"the optimizer '{str(spec)[:100]}' cannot be made: {first_line(error)}; correct it"
            ) from error

    return make


def _class_of(name: str) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
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
    return found, {}
