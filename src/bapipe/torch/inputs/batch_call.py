"""A batch as the model is called with it: args and kwargs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

__all__ = ["Call", "as_call"]


class Call(NamedTuple):
    """What a model is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def as_call(inputs: Any, keywords: Sequence[str] | None = None) -> Call:
    """The call that a batch stands for: a tensor, a tuple of args, a dict or dataclass of kwargs, or args and then
    a dict of kwargs.

    `keywords` are those that the model takes; None: not known. A model without any takes dicts and dataclasses as
    args.
    """
    named = keywords is None or len(keywords) > 0
    if isinstance(inputs, Mapping):
        return Call((), dict(inputs)) if named else Call((inputs,), {})
    if is_dataclass(inputs) and not isinstance(inputs, type) and named:
        return Call((), {item.name: getattr(inputs, item.name) for item in fields(inputs)})
    if not isinstance(inputs, (tuple, list)):
        return Call((inputs,), {})
    args = tuple(inputs)
    if args and named and isinstance(args[-1], Mapping):
        return Call(args[:-1], dict(args[-1]))
    return Call(args, {})
