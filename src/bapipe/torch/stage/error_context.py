"""From an exception in a stage to the user's layer: its name, what went into it, and the user's line of code."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from torch import Tensor

from bapipe.errors import BaPipeError
from bapipe.schedule.actions import Action
from bapipe.torch.capturing import Stage

__all__ = ["ActionError", "described", "layers_of", "one_line"]

_LOSS_FILE = "bapipe/torch/stage/loss.py"
_NAME = re.compile(r"[A-Za-z_]\w*")
_SHOWN = 6
"""tensors whose shapes are said"""


class ActionError(BaPipeError):
    """An action that failed; says which rank, stage and action, and why."""

    def __init__(self, rank: int, action: Action, cause: Exception, reason: str) -> None:
        self.cause = cause
        self.reason = reason
        super().__init__(f"rank {rank}, stage {action.stage}, action {action}: {reason}")


def one_line(error: BaseException) -> str:
    """The error on one line; if it is not BaPipe's own, with the place in the user's code that raised it."""
    line = (str(error).splitlines() or [""])[0]
    if isinstance(error, BaPipeError):
        return line[:2000]  # what to do stands at its end
    line = line[:300]
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {line}{place}"


def _is_users(filename: str) -> bool:
    return "/torch/" not in filename.replace("\\", "/") and not filename.startswith("<")


def layers_of(stage: Stage) -> str:
    """The layers of a stage, in words."""
    names = list(dict.fromkeys(name for name, _ in stage.stage_origins.values()))
    if not names:
        return f"layers {stage.stage_spec.first} to {stage.stage_spec.last}"
    if len(names) == 1:
        return f"layer '{names[0]}'"
    return f"layers '{names[0]}' to '{names[-1]}'"


def described(error: BaseException, stage: Stage, *, microbatch: int | None) -> str:
    """The error on one line, with the layer that it came from, the micro-batch, and the shapes that went in.

    Of an error in a backward only the stage's layers are known.
    """
    if isinstance(error, BaPipeError):
        return one_line(error)
    place, values = _fault(error.__traceback__)
    parts = [place or f"in {layers_of(stage)}"]
    if microbatch is not None:
        parts.append(f"micro-batch {microbatch}")
    if values:
        parts.append(f"given {', '.join(values)}")
    return f"{one_line(error)}, {', '.join(parts)}"


def _fault(trace: TracebackType | None) -> tuple[str, list[str]]:
    """Where in the model it was raised, and the tensors that went in."""
    place, values = "", list[str]()
    for frame, line in _frames(trace):
        stage = frame.f_locals.get("self")
        if frame.f_code.co_filename.startswith("<stage ") and isinstance(stage, Stage):
            text = stage.stage_source.splitlines()[line - 1]
            made, _, call = text.partition(" = ")
            layer, at = stage.stage_origins.get(made.strip(), ("", ""))
            place = f"in layer '{layer}'" if layer else ""
            place += f" at {at}" if place and at else ""
            names = dict.fromkeys(_NAME.findall(call.partition(";")[0]))
            values = _shapes(frame.f_locals.get(name) for name in names)
        elif frame.f_code.co_filename.endswith(_LOSS_FILE) and frame.f_code.co_name == "of":
            place = "in the loss"
            values = _shapes((frame.f_locals.get("output"), frame.f_locals.get("target")))
    return place, values


def _frames(trace: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while trace is not None:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def _shapes(values: Iterator[Any] | tuple[Any, ...]) -> list[str]:
    tensors = [value for value in values if isinstance(value, Tensor)]
    shown = [f"{tuple(item.shape)} {str(item.dtype).removeprefix('torch.')}" for item in tensors[:_SHOWN]]
    return [*shown, "…"] if len(tensors) > _SHOWN else shown
