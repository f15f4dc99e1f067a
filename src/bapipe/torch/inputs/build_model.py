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

from bapipe.costs.optimizers import find_optimizer
from bapipe.errors import BaPipeError, nearest
from bapipe.models.layers import ModelRef
from bapipe.torch.capturing.torch_internals import flatten, unflatten
from bapipe.torch.device.dtypes import find_dtype

__all__ = ["BuiltModel", "Loss", "build_model", "make_optimizer"]

Loss = Callable[[Any, Any], Any]
Parameters = list[nn.Parameter]

_OPTIMIZERS: dict[str, Callable[[Parameters, float], torch.optim.Optimizer]] = {
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
    loss: Loss | None
    """`loss(output, target)`: a mean or (sum, count); None: the model takes its target and returns its loss"""
    options: dict[str, Any]
    """what the model was built with"""
    source: ModuleType
    """the Python module that the reference names"""

    def companion(self, name: str, contract: str) -> Callable[..., Any]:
        """A function that stands beside the one that the reference names."""
        return _companion(self.source, name, contract)

    def as_call(self, inputs: Any, target: Any) -> tuple[Any, Any]:
        """(inputs, target) as the model takes them: with the target as a keyword where it returns its loss."""
        if self.loss is not None:
            return inputs, target
        args = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
        return (*args, {"target": target}), None


def build_model(
    model: ModelRef, *, folders: Sequence[str | Path] = (), seed: int = 0, dtype: str | None = None
) -> BuiltModel:
    """Import `package.module:function`, call it with the reference's arguments, check what comes back.

    `folders` are searched first; the caller gives the plan's own and the current one. Torch's generator is seeded
    before the call, so every process that builds the same reference has the same weights. With `dtype`, by its
    name in a plan, floating parameters and inputs are converted.
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
    own_loss = kwargs.keys() == {"target"}
    loss = None if own_loss else _companion(source, "loss", "loss(output, target) -> a mean or (sum, count)")
    if dtype is not None:
        module, args, kwargs = _converted(module, args, kwargs, dtype)
    return BuiltModel(
        module=module, args=tuple(args), kwargs=kwargs, loss=loss, options=dict(model.args), source=source
    )


def _converted(module: nn.Module, args: Any, kwargs: Any, dtype: str) -> tuple[nn.Module, Any, Any]:
    wanted = find_dtype(dtype)
    leaves, structure = flatten((tuple(args), kwargs))
    changed = [
        leaf.to(wanted) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf for leaf in leaves
    ]
    args, kwargs = unflatten(changed, structure)
    return module.to(wanted), args, kwargs


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


def make_optimizer(name: str, parameters: Parameters, *, rate: float) -> torch.optim.Optimizer | None:
    """The plan's optimizer over parameters; None where there are none to update."""
    find_optimizer(name.lower())
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return _OPTIMIZERS[name.lower()](trained, rate) if trained else None


def _kind(value: object) -> str:
    return type(value).__name__


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]
