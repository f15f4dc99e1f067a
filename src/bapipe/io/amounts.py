"""Amounts in files: seconds, bytes, samples, counts. None is negative."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from bapipe.errors import BaPipeError

__all__ = ["require_amounts"]


def require_amounts(value: Any, *, where: str, todo: str, signed: Collection[str] = ()) -> None:
    """Refuse a dataclass one of whose numbers is below 0; those of the fields in `signed` may be.

    Numbers in tuples and tables of a field count; values of other dataclasses within it do not.
    """
    for field in dataclasses.fields(value):
        if field.name in signed:
            continue
        found = getattr(value, field.name)
        items: Any = (found,)
        if isinstance(found, tuple):
            items = found
        elif isinstance(found, dict):
            items = found.values()
        for item in items:
            if isinstance(item, (int, float)) and item < 0:
                raise BaPipeError(f"{where}: {field.name} must be at least 0, got {item:g}; {todo}")
