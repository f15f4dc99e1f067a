"""Models BaPipe knows by name, as layer tables written from their architecture: no weights, nothing to run."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass

from bapipe.errors import BaPipeError, nearest
from bapipe.models.builtin.convolutional import alexnet, resnet18, resnet50, vgg16
from bapipe.models.builtin.recurrent import gnmt
from bapipe.models.builtin.transformers import bert, gpt2, llama
from bapipe.models.layers import Model

__all__ = ["BUILTIN_NAMES", "Argument", "SizeOption", "builtin_model", "is_builtin", "size_option"]

Argument = str | int | float | bool
_MAX = 10**9
"""larger arguments are taken for a slip of the pen"""
_TABLES: dict[str, Callable[..., Model]] = {
    "vgg16": vgg16,
    "alexnet": alexnet,
    "resnet18": resnet18,
    "resnet50": resnet50,
    "gnmt-8": functools.partial(gnmt, layers=8),
    "gnmt-16": functools.partial(gnmt, layers=16),
    "gnmt-32": functools.partial(gnmt, layers=32),
    "bert-base": functools.partial(bert, name="bert-base", width=768, blocks=12, heads=12),
    "bert-large": functools.partial(bert, name="bert-large", width=1024, blocks=24, heads=16),
    "gpt2": functools.partial(gpt2, name="gpt2", width=768, blocks=12, heads=12),
    "gpt2-medium": functools.partial(gpt2, name="gpt2-medium", width=1024, blocks=24, heads=16),
    "gpt2-large": functools.partial(gpt2, name="gpt2-large", width=1280, blocks=36, heads=20),
    "gpt2-xl": functools.partial(gpt2, name="gpt2-xl", width=1600, blocks=48, heads=25),
    "llama-7b": functools.partial(
        llama, name="llama-7b", width=4096, blocks=32, heads=32, kv_heads=32, mlp_width=11008
    ),
    "llama-13b": functools.partial(
        llama, name="llama-13b", width=5120, blocks=40, heads=40, kv_heads=40, mlp_width=13824
    ),
    "llama-70b": functools.partial(
        llama, name="llama-70b", width=8192, blocks=80, heads=64, kv_heads=8, mlp_width=28672
    ),
}
BUILTIN_NAMES: tuple[str, ...] = tuple(_TABLES)
"""gnmt-L works for every even L of at least 4, up to 1000; three of them are listed"""
_GNMT = re.compile(r"gnmt-?([0-9]{1,4})")


def _table(name: str) -> Callable[..., Model] | None:
    key = name.strip().lower()
    if key in _TABLES:
        return _TABLES[key]
    match = _GNMT.fullmatch(key)
    if match is None:
        return None
    layers = int(match[1])
    if layers > 1000:
        raise BaPipeError(f"GNMT has at most 1000 layers here, got {layers}; lower it")
    return functools.partial(gnmt, layers=layers)


def is_builtin(name: str) -> bool:
    """Whether `builtin_model` knows the name."""
    key = name.strip().lower()
    return key in _TABLES or _GNMT.fullmatch(key) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeOption:
    """An option of a built-in model by which it grows."""

    name: str
    usual: int
    """as the model of that name has it"""
    least: int
    step: int
    """values are the least and multiples of this beyond it"""
    most: int
    """the largest that makes sense"""


_LONGEST = {"gpt2": 1024, "bert": 512}
"""tokens that the positions of these models reach to"""
_DEPTHS = ("blocks", "layers")


def size_option(name: str, quantity: str) -> SizeOption:
    """The option by which a built-in model's sequence or depth changes; raises BaPipeError where it has none."""
    table = _table(name)
    assert table is not None, "only built-in models are asked for"
    fixed = dict(table.keywords) if isinstance(table, functools.partial) else {}
    function = table.func if isinstance(table, functools.partial) else table
    defaults = {key: item.default for key, item in inspect.signature(function).parameters.items()}
    if quantity == "sequence" and "sequence" in defaults:
        usual = int(defaults["sequence"])
        step = min(128, usual)
        most = _LONGEST.get(function.__name__, 1024 * usual)
        return SizeOption(name="sequence", usual=usual, least=step, step=step, most=most)
    own = next((key for key in _DEPTHS if key in fixed), None)
    if quantity == "depth" and own is not None:
        least, step = (4, 2) if own == "layers" else (1, 1)
        return SizeOption(name=own, usual=int(fixed[own]), least=least, step=step, most=1000)
    raise BaPipeError(
        f"{name} has no {quantity} to change; write its layers as a table (.toml) of another {quantity} and plan "
        "that, or use --largest batch"
    )


def builtin_model(name: str, **args: Argument) -> Model:
    """The table of that name; `args` are the options of its function, such as image=224 or sequence=512."""
    table = _table(name)
    if table is None:
        raise BaPipeError(
            f"unknown model '{name[:60]}'{nearest(name, BUILTIN_NAMES)}; built-in are {', '.join(BUILTIN_NAMES)} "
            "and gnmt-L for every even L of at least 4"
        )
    fixed = {
        key: value
        for key, value in (table.keywords if isinstance(table, functools.partial) else {}).items()
        if key not in _DEPTHS
    }
    options = {key: item for key, item in inspect.signature(table).parameters.items() if key not in fixed}
    for key, value in args.items():
        if key not in options:
            raise BaPipeError(
                f"{name} has no option '{key[:60]}'{nearest(key, options)}; its options are {', '.join(options)}"
            )
        wanted = type(options[key].default)
        if type(value) is not wanted or (wanted is int and not 0 < int(value) <= _MAX):
            kind = "a whole number of at least 1" if wanted is int else "a text"
            raise BaPipeError(f"{name}: {key} must be {kind}, got {str(value)[:60]!r}; correct it")
    return table(**args)
