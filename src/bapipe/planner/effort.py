"""How much is simulated to find a faster plan: by a word, which gives the same plan everywhere, or by seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bapipe.errors import BaPipeError, nearest
from bapipe.planner.tuning import Tuning

__all__ = ["EFFORTS", "Effort", "check_effort", "effort_of"]

EFFORTS = ("low", "normal", "high")
_LONGEST = 86_400.0
"""seconds: a day"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What one search by simulation may spend."""

    steps: float
    """actions that are timed"""
    seconds: float = math.inf
    more: int = 1
    """times as many plans are listed as usual"""
    share: float = 1.0
    """times as many actions are moved as usual"""


def check_effort(effort: str | float) -> None:
    """Raise BaPipeError for what is neither a word nor a time."""
    if isinstance(effort, str):
        if effort not in EFFORTS:
            raise BaPipeError(
                f"unknown effort '{effort[:40]}'{nearest(effort, EFFORTS)}; give low, normal, high or seconds"
            )
    elif not 0 < effort <= _LONGEST:
        raise BaPipeError(f"--effort must be more than 0 s and at most a day, got {effort:g} s; correct it")


def effort_of(effort: str | float, tuning: Tuning) -> Effort:
    """What a word or so many seconds allow."""
    if not isinstance(effort, str):
        return Effort(steps=math.inf, seconds=effort, more=tuning.search_more, share=tuning.search_more)
    if effort == "high":
        more = tuning.search_more
        return Effort(steps=tuning.search_steps * more, more=more, share=more)
    return (
        Effort(steps=tuning.search_steps // 10, share=0.1)
        if effort == "low"
        else Effort(steps=tuning.search_steps)
    )
