"""Plain JSON or TOML values -> frozen dataclasses, strictly.

The dataclass is the schema: an unknown key, a missing one, a wrong type, a NaN, an absurd number is refused with
its place in the file, and a misspelt key with the nearest valid one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from bapipe.errors import FileFormatError, nearest
from bapipe.io.renamed_keys import with_new_names

__all__ = ["LARGEST_NUMBER", "decode"]

LARGEST_NUMBER = 1e30
"""of a file; a larger one is a slip of the pen, and products of several would not be finite"""
_LARGEST_INT = 2**63 - 1
T = TypeVar("T")
_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def decode(cls: type[T], data: object, *, where: str) -> T:
    """Build `cls` from plain values; `where` names the file in errors."""
    return typing.cast(T, _value(cls, data, where))


@functools.cache
def _fields(cls: Any) -> dict[str, tuple[Any, bool]]:
    """Field name -> (type, required)."""
    hints = typing.get_type_hints(cls)
    return {
        field.name: (
            hints[field.name],
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(cls)
    }


def _shown(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 1000:
        return "a whole number of more than 300 digits"  # which Python may refuse to write
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "…"


def _dataclass(cls: Any, data: object, where: str) -> Any:
    if not isinstance(data, dict):
        raise FileFormatError(f"{where}: expected a table of {', '.join(_fields(cls))}; got {_shown(data)}")
    fields = _fields(cls)
    data = with_new_names(data, fields, where=where)
    for key in data:
        if key not in fields:
            name = str(key)[:60]
            raise FileFormatError(f"{where}: unknown key '{name}'{nearest(name, fields)}; remove or rename it")
    values = {}
    for name, (kind, required) in fields.items():
        if name in data:
            values[name] = _value(kind, data[name], f"{where}: {name}")
        elif required:
            raise FileFormatError(f"{where}: '{name}' is missing; add it")
    return cls(**values)


def _value(kind: Any, data: object, where: str) -> Any:
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, data, where)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _union(arguments, data, where)
    if origin is typing.Literal:
        if data not in arguments:
            options = ", ".join(map(str, arguments))
            raise FileFormatError(
                f"{where}: must be one of {options}; got {_shown(data)}{nearest(str(data), map(str, arguments))}"
            )
        return data
    if origin is tuple:
        if not isinstance(data, list):
            raise FileFormatError(f"{where}: expected a list; got {_shown(data)}")
        return tuple(_value(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(data))
    if origin is dict:
        if not isinstance(data, dict):
            raise FileFormatError(f"{where}: expected a table; got {_shown(data)}")
        return {str(key): _value(arguments[1], item, f"{where}: {str(key)[:60]}") for key, item in data.items()}
    if kind is Path:
        return Path(_scalar(str, data, where))
    return _scalar(kind, data, where)


def _union(options: tuple[Any, ...], data: object, where: str) -> Any:
    if data is None and type(None) in options:
        return None
    remaining = [option for option in options if option is not type(None)]
    if len(remaining) == 1:
        return _value(remaining[0], data, where)
    for option in remaining:
        try:
            return _value(option, data, where)
        except FileFormatError:
            continue
    names = " or ".join(_NAMES.get(option, str(option)) for option in remaining)
    raise FileFormatError(f"{where}: expected {names}; got {_shown(data)}")


def _scalar(kind: Any, data: object, where: str) -> Any:
    accepted = isinstance(data, kind) or (kind is float and isinstance(data, int))
    if not accepted or (isinstance(data, bool) and kind is not bool):
        raise FileFormatError(f"{where}: expected {_NAMES.get(kind, str(kind))}; got {_shown(data)}")
    if kind is int and abs(typing.cast(int, data)) > _LARGEST_INT:
        raise FileFormatError(f"{where}: expected a whole number within 64 bits; got {_shown(data)}")
    if kind is not float:
        return data
    try:
        number = float(typing.cast(float, data))
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise FileFormatError(f"{where}: expected a finite number; got {_shown(data)}")
    if abs(number) > LARGEST_NUMBER:
        raise FileFormatError(f"{where}: expected a number of at most {LARGEST_NUMBER:g}; got {_shown(data)}")
    return number
