"""Parameter types of the command line."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

__all__ = ["Counts", "Numbers", "plain_number"]

# Of click 8.1 the class takes no type argument.
if TYPE_CHECKING:
    _Floats = click.ParamType[tuple[float, ...]]
    _Ints = click.ParamType[tuple[int, ...]]
else:
    _Floats = _Ints = click.ParamType


class Numbers(_Floats):
    """One finite number or several, separated by commas."""

    name = "number[,number…]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(float(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"'{str(value)[:60]}' is not a number or a list such as 10,20,10", param, ctx)
        if not all(math.isfinite(number) for number in numbers):
            self.fail(f"'{str(value)[:60]}' must be finite", param, ctx)
        return numbers


class Counts(_Ints):
    """One whole number or several, separated by commas."""

    name = "count[,count…]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"'{str(value)[:60]}' is not a whole number or a list such as 4,3,2,1", param, ctx)


def plain_number(value: Any) -> Any:
    """170.0 -> 170, also inside lists and tables, so that output reads as it was typed."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {key: plain_number(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_number(item) for item in value]
    return value
