"""From a model reference to the module itself, on every rank the same weights."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from bapipe.errors import BaPipeError, first_line, nearest
from bapipe.models.layers import ModelRef
from bapipe.torch.capturing.torch_internals import flatten, unflatten
from bapipe.torch.device.dtypes import weights_dtype
from bapipe.torch.inputs.batch_call import as_call

__all__ = ["BuiltModel", "Loss", "build_model", "module_and_example"]

Loss = Callable[[Any, Any], Any]
_EXAMPLE = 2
"""samples of the example that `make_batch` is asked for where the function returns the module alone"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BuiltModel:
    """A module, an example of its input, and what to train it with."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Loss | None
    """`loss(output, target)`: a mean, a sum or (sum, count); None: the model returns its loss"""
    model: ModelRef = field(default_factory=lambda: ModelRef(name="model"))
    """what was built"""
    make_batch: Callable[[int, int], Any] | None = None
    """`make_batch(seed, size)`, with those of the reference's arguments that it takes; None: there is none"""
    where: str = "the model's module"
    """name of the Python module that the reference names"""
    weights: Mapping[str, Tensor] | None = None
    """where the parameters are to be read from, by name; None: the module has them"""

    def as_call(self, batch: Any) -> tuple[Any, Any]:
        """What `make_batch` returns, as (inputs, target) of the model; the target is None if it returns its loss.

        With a loss function a batch is (inputs, target). Without one it is the inputs alone, labels included;
        where the example has nothing but `target` beside its args, (inputs, target) is taken too.
        """
        pair = isinstance(batch, tuple) and len(batch) == 2
        if self.loss is not None:
            if not pair:
                raise BaPipeError(
                    f"{self.where}.make_batch must return (inputs, target), as there is a loss function; "
                    f"got {type(batch).__name__}"
                )
            return batch[0], batch[1]
        if pair and self.kwargs.keys() == {"target"} and not isinstance(batch[1], Mapping):
            call = as_call(batch[0])
            return (*call.args, {**call.kwargs, "target": batch[1]}), None
        return batch, None


def build_model(
    model: ModelRef,
    *,
    folders: Sequence[str | Path] = (),
    seed: int = 0,
    precision: str | None = None,
    hollow: bool = False,
) -> BuiltModel:
    """Import `package.module:function`, call it with the reference's arguments, check what comes back.

    The function returns a module, (module, args) or (module, args, kwargs). Without args the example is what
    `make_batch` beside it returns. `folders` are searched before the current one. Torch's generator is seeded
    before the call, so every process that builds the same reference has the same weights. With a `precision`, by
    its word in a plan, floating parameters and inputs are converted to the dtype of its weights.

    With `hollow` the parameters may be left out, for whoever needs some of them only: where the function's module
    has `build_hollow`, which takes the same arguments and returns (what the function returns, but without memory
    for its parameters, and a mapping to read them from) or None.
    """
    if model.ref is None:
        raise BaPipeError(f"{model.name} has no code to run; set model.ref to package.module:function")
    for folder in (Path.cwd(), *reversed(folders)):
        path = str(Path(folder).resolve())
        if path not in sys.path:
            sys.path.insert(0, path)
    source, function = _import(model.ref)
    torch.manual_seed(seed)
    try:
        built, weights = _call(source, function, model, hollow=hollow)
    except (BaPipeError, KeyboardInterrupt):
        raise
    except BaseException as error:  # sys.exit() of a script that was written to be run
        given = ", ".join(f"{key}={value!r}" for key, value in model.args.items())
        raise BaPipeError(
            f"'{model.ref[:100]}' called with ({given[:200]}) failed: {type(error).__name__}: "
            f"{first_line(error)}; correct it or the --arg options"
        ) from error
    make_batch = _batches(source, model.args)
    module, args, kwargs = module_and_example(built, model.ref[:100])
    # A function that is given its target returns the loss; so does a model without a loss function beside it.
    loss = None if kwargs is not None and kwargs.keys() == {"target"} else getattr(source, "loss", None)
    found = BuiltModel(
        model=model,
        module=module,
        args=args or (),
        kwargs=kwargs or {},
        loss=loss if callable(loss) else None,
        make_batch=make_batch,
        where=source.__name__,
        weights=weights,
    )
    if args is None:
        found = _with_example(found)
    return found if precision is None else _converted(found, precision)


def _call(
    source: ModuleType, function: Callable[..., Any], model: ModelRef, *, hollow: bool
) -> tuple[Any, Mapping[str, Tensor] | None]:
    """What the function returns, and where the parameters are to be read from."""
    without = getattr(source, "build_hollow", None) if hollow else None
    found = without(**model.args) if callable(without) else None
    return (function(**model.args), None) if found is None else found


def module_and_example(built: Any, what: str) -> tuple[nn.Module, tuple[Any, ...] | None, dict[str, Any] | None]:
    """What a function returned: a module, (module, args) or (module, args, kwargs); what is not given is None."""
    if isinstance(built, nn.Module):
        return built, None, None
    parts = tuple(built) if isinstance(built, (tuple, list)) else ()
    shape: tuple[Any, ...] = (nn.Module, (tuple, list), dict)
    if len(parts) == 2 and isinstance(parts[1], Mapping):
        parts = (parts[0], (), dict(parts[1]))
    if not 2 <= len(parts) <= 3 or not all(
        isinstance(part, kind) for part, kind in zip(parts, shape, strict=False)
    ):
        got = f"({', '.join(type(part).__name__ for part in parts)})" if parts else type(built).__name__
        raise BaPipeError(
            f"'{what}' must return a module, (module, args) or (module, args, kwargs), args a tuple and kwargs "
            f"a dict; got {got}"
        )
    return parts[0], tuple(parts[1]), dict(parts[2]) if len(parts) == 3 else {}


def _with_example(built: BuiltModel) -> BuiltModel:
    """The same with the inputs of a batch as its example."""
    if built.make_batch is None:
        raise BaPipeError(
            f"'{built.model.ref}' returns a module without an example of its inputs; return (module, args) or "
            f"(module, args, kwargs), or add make_batch(seed, size) to {built.where}"
        )
    call = as_call(built.as_call(built.make_batch(0, _EXAMPLE))[0])
    return replace(built, args=call.args, kwargs=call.kwargs)


def _batches(source: ModuleType, args: Mapping[str, Any]) -> Callable[..., Any] | None:
    function = getattr(source, "make_batch", None)
    if not callable(function):
        return None
    accepted = inspect.signature(function).parameters
    takes_all = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in accepted.values())
    options = {key: value for key, value in args.items() if takes_all or key in accepted}
    return lambda seed, size: function(seed, size, **options)


def _converted(built: BuiltModel, precision: str) -> BuiltModel:
    wanted = weights_dtype(precision)
    leaves, structure = flatten((built.args, built.kwargs))
    changed = [
        leaf.to(wanted) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf for leaf in leaves
    ]
    args, kwargs = unflatten(changed, structure)
    return replace(built, module=built.module.to(wanted), args=args, kwargs=kwargs)


def _import(ref: str) -> tuple[ModuleType, Callable[..., Any]]:
    name, colon, attribute = ref.partition(":")
    if not colon or not name or not attribute:
        raise BaPipeError(f"a model reference looks like package.module:function, got '{ref[:100]}'")
    try:
        source = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise BaPipeError(
            f"'{ref[:100]}' cannot be imported: {error}; run in its folder, put it beside the plan or on "
            "PYTHONPATH"
        ) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise BaPipeError(
            f"'{ref[:100]}' cannot be imported: {type(error).__name__}: {first_line(error)}; correct {name[:99]}"
        ) from error
    function = getattr(source, attribute, None)
    if not callable(function):
        raise BaPipeError(
            f"'{name[:99]}' has no function '{attribute[:60]}'{nearest(attribute, vars(source))}; correct it"
        )
    return source, cast(Callable[..., Any], function)
