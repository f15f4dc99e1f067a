"""MODEL of `bapipe profile` -> the module itself and an example of its inputs."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from bapipe.errors import BaPipeError, nearest
from bapipe.models.layers import ModelRef

__all__ = ["ZOO", "Argument", "Source", "find_model"]

Argument = str | int | float | bool
ZOO = {
    "vgg16": "bapipe.torch.zoo.vgg:build_vgg16",
    "resnet50": "bapipe.torch.zoo.resnet:build_resnet50",
    "gnmt-8": "bapipe.torch.zoo.gnmt:build_gnmt",
    "gpt": "bapipe.torch.zoo.gpt:build_gpt",
    "unet": "bapipe.torch.zoo.unet:build_unet",
}
"""built-in modules by name; gnmt-L works for every even L of at least 4"""
_GNMT = re.compile(r"gnmt-?([0-9]{1,4})")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Source:
    """A module and an example of its inputs."""

    model: ModelRef
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def find_model(spec: str, args: Mapping[str, Argument] | None = None, *, seed: int = 0) -> Source:
    """Build what `spec` names: `package.module:function`, called with `args`, or a model of the zoo.

    The current folder is searched first. Weights come from torch's generator, seeded before the call.
    """
    text = spec.strip()
    given = dict(args or {})
    name, ref = text, text
    match = _GNMT.fullmatch(text.lower())
    if match:
        ref, given = ZOO["gnmt-8"], {"layers": int(match[1]), **given}
    elif text.lower() in ZOO:
        name, ref = text.lower(), ZOO[text.lower()]
    elif ":" in text:
        name = text.partition(":")[2]
    else:
        raise BaPipeError(
            f"unknown model '{text[:60]}'{nearest(text, ZOO)}; give package.module:function or {', '.join(ZOO)}"
        )
    function = _import(ref)
    torch.manual_seed(seed)
    try:
        built = function(**given)
    except BaPipeError:
        raise
    except Exception as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in given.items())
        raise BaPipeError(
            f"'{ref[:100]}' called with ({shown[:200]}) failed: {type(error).__name__}: {_first_line(error)}; "
            "correct it or the --arg options"
        ) from error
    if not (isinstance(built, tuple) and len(built) == 3):
        raise BaPipeError(f"'{ref[:100]}' must return (module, args, kwargs), got {type(built).__name__}")
    module, inputs, kwargs = built
    if not isinstance(module, nn.Module) or not isinstance(inputs, (tuple, list)) or not isinstance(kwargs, dict):
        kinds = ", ".join(type(part).__name__ for part in built)
        raise BaPipeError(f"'{ref[:100]}' must return (nn.Module, tuple, dict), got ({kinds})")
    return Source(model=ModelRef(name=name, ref=ref, args=given), module=module, args=tuple(inputs), kwargs=kwargs)


def _import(ref: str) -> Callable[..., Any]:
    name, _, attribute = ref.partition(":")
    if not name or not attribute:
        raise BaPipeError(f"a model looks like package.module:function, got '{ref[:100]}'")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        source = importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise BaPipeError(
            f"'{ref[:100]}' cannot be imported: {error}; run in its folder or put it on PYTHONPATH"
        ) from error
    except Exception as error:
        raise BaPipeError(
            f"'{ref[:100]}' cannot be imported: {type(error).__name__}: {_first_line(error)}; correct {name}"
        ) from error
    function = getattr(source, attribute, None)
    if not callable(function):
        raise BaPipeError(
            f"'{name[:99]}' has no function '{attribute[:60]}'{nearest(attribute, vars(source))}; correct it"
        )
    return cast(Callable[..., Any], function)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:200]
