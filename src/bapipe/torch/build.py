"""From a model reference to the module itself, on every rank the same weights."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from bapipe.errors import BaPipeError, nearest
from bapipe.files import content_hash
from bapipe.model import ModelRef

__all__ = ["OPTIMIZERS", "BuiltModel", "Loss", "build_model", "fingerprint", "make_optimizer"]

Loss = Callable[[Tensor, Tensor], Tensor]
Parameters = list[nn.Parameter]

OPTIMIZERS: dict[str, Callable[[Parameters, float], torch.optim.Optimizer]] = {
    "sgd": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate),
    "momentum": lambda parameters, rate: torch.optim.SGD(parameters, lr=rate, momentum=0.9),
    "adam": lambda parameters, rate: torch.optim.Adam(parameters, lr=rate),
    "adamw": lambda parameters, rate: torch.optim.AdamW(parameters, lr=rate),
}
"""by the plan's `optimizer`; each updates a parameter from that parameter's gradient alone"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BuiltModel:
    """A module, an example of its input, and what to train it with."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Loss
    """`loss(output, target)`: mean over the samples"""
    source: ModuleType
    """the Python module that the reference names"""

    def batch(self, seed: int, size: int) -> tuple[Tensor, Tensor]:
        """Input and target of so many samples; floating input has the dtype of the example."""
        make_batch = _companion(self.source, "make_batch", "make_batch(seed, size) -> (input, target)")
        pair = make_batch(seed, size)
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(part, Tensor) for part in pair)):
            raise BaPipeError(f"{self.source.__name__}.make_batch must return (input, target), got {_kind(pair)}")
        if any(part.ndim == 0 or len(part) != size for part in pair):
            shapes = " and ".join(str(tuple(part.shape)) for part in pair)
            raise BaPipeError(f"{self.source.__name__}.make_batch was asked for {size} samples, got {shapes}")
        data, target = pair
        example = self.args[0] if self.args else None
        if data.is_floating_point() and isinstance(example, Tensor) and example.is_floating_point():
            data = data.to(example.dtype)
        return data, target


def build_model(model: ModelRef, *, folders: Sequence[str | Path] = (), seed: int = 0) -> BuiltModel:
    """Import `package.module:function`, call it with the reference's arguments, check what comes back.

    `folders` are searched first; the caller gives the plan's own and the current one. Torch's generator is seeded
    before the call, so every process that builds the same reference has the same weights.
    """
    if model.ref is None:
        raise BaPipeError(f"{model.name} has no code to run; set model.ref to package.module:function")
    for folder in reversed(folders):
        path = str(Path(folder).resolve())
        if path not in sys.path:
            sys.path.insert(0, path)
    source, function = _import(model.ref)
    torch.manual_seed(seed)
    try:
        built = function(**model.args)
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in model.args.items())
        raise BaPipeError(
            f"'{model.ref}' called with ({given}) failed: {type(error).__name__}: {_first_line(error)}; "
            "correct it or the model.args"
        ) from error
    if not (isinstance(built, tuple) and len(built) == 3):
        raise BaPipeError(f"'{model.ref}' must return (module, args, kwargs), got {_kind(built)}")
    module, args, kwargs = built
    if not isinstance(module, nn.Module) or not isinstance(args, (tuple, list)) or not isinstance(kwargs, dict):
        raise BaPipeError(
            f"'{model.ref}' must return (nn.Module, tuple, dict), got {', '.join(map(_kind, built))}"
        )
    loss = _companion(source, "loss", "loss(output, target) -> mean over the samples")
    return BuiltModel(module=module, args=tuple(args), kwargs=kwargs, loss=loss, source=source)


def _import(ref: str) -> tuple[ModuleType, Callable[..., Any]]:
    name, colon, attribute = ref.partition(":")
    if not colon or not name or not attribute:
        raise BaPipeError(f"a model reference looks like package.module:function, got '{ref[:100]}'")
    try:
        source = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise BaPipeError(
            f"'{ref}' cannot be imported: {error}; put it in the current folder, beside the plan or on PYTHONPATH"
        ) from error
    except Exception as error:
        raise BaPipeError(
            f"'{ref}' cannot be imported: {type(error).__name__}: {_first_line(error)}; correct {name}"
        ) from error
    function = getattr(source, attribute, None)
    if not callable(function):
        raise BaPipeError(
            f"'{name}' has no function '{attribute}'{nearest(attribute, vars(source))}; correct '{ref}'"
        )
    return source, cast(Callable[..., Any], function)


def _companion(source: ModuleType, name: str, contract: str) -> Callable[..., Any]:
    function = getattr(source, name, None)
    if not callable(function):
        raise BaPipeError(f"'{source.__name__}' has no {name}, which training needs; add {contract}")
    return cast(Callable[..., Any], function)


def fingerprint(module: nn.Module, layers: Sequence[str]) -> str:
    """Hash of layer names and of parameter names and shapes; the same for every dtype and torch version."""
    parameters = [[name, list(parameter.shape)] for name, parameter in module.named_parameters()]
    return content_hash({"layers": list(layers), "parameters": parameters})


def make_optimizer(name: str, module: nn.Module, *, rate: float) -> torch.optim.Optimizer | None:
    """The plan's optimizer over a module's parameters; None where there are none to update."""
    known = OPTIMIZERS.get(name.lower())
    if known is None:
        raise BaPipeError(
            f"unknown optimizer '{name[:60]}'{nearest(name, OPTIMIZERS)}; known: {', '.join(OPTIMIZERS)}"
        )
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return known(parameters, rate) if parameters else None


def _kind(value: object) -> str:
    return type(value).__name__


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]
