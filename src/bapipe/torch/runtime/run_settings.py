"""What a checkpoint records of a training beside model, optimizer and precision."""

from __future__ import annotations

import functools
import re
from typing import Any

from torch import nn

from bapipe.records.training_record import Setting
from bapipe.schedule.actions import Schedule

__all__ = ["run_settings"]

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def run_settings(schedule: Schedule, seed: int | None, loss_fn: Any) -> dict[str, Setting]:
    """Settings of a training that every plan of it has the same of; no seed where torch's generator is left alone.

    Schedules that wait for all gradients of a global batch train alike; PipeDream does not.
    """
    found: dict[str, Setting] = {} if seed is None else {"seed": seed}
    found["the loss"] = _name(loss_fn)
    found["optimizer steps"] = "after each global batch" if schedule.flushes else "after each micro-batch"
    return found


def _name(function: Any) -> str:
    """A function's name, without its module: a script is `__main__` when it is started and not when imported."""
    if function is None:
        return "the model's own"
    if isinstance(function, nn.Module):
        return _ADDRESS.sub("", " ".join(repr(function).split()))
    if isinstance(function, functools.partial):
        options = ", ".join(f"{key}={value!r}" for key, value in sorted(function.keywords.items()))
        return _ADDRESS.sub("", f"{_name(function.func)} with {options}")
    return str(getattr(function, "__qualname__", type(function).__qualname__))
