"""The plan's optimizer as torch has it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from bapipe.costs.optimizers import find_optimizer

__all__ = ["make_optimizer"]

Parameters = list[nn.Parameter]

_OPTIMIZERS: dict[str, Callable[[Parameters, float], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate),
    "momentum": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
    "adam": lambda parameters, rate: torch.optim.Adam(parameters, lr=rate),
    "adamw": lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate),
}
"""by the plan's `optimizer`; each changes a parameter by that parameter's gradient alone"""


def make_optimizer(name: str, parameters: Parameters, *, rate: float) -> torch.optim.Optimizer | None:
    """The plan's optimizer over parameters; None where none of them is trained."""
    find_optimizer(name.lower())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return _OPTIMIZERS[name.lower()](trained, rate) if trained else None
