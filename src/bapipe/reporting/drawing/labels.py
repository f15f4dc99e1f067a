"""The words and numbers of a drawing: action names, times, axis ticks, titles."""

from __future__ import annotations

import math

from bapipe.schedule.actions import Action, Kind
from bapipe.simulator.timeline import Timeline
from bapipe.units import format_seconds

__all__ = ["action_name", "format_time", "printable", "ticks"]


def action_name(timeline: Timeline, index: int) -> str:
    """`2F0`: stage 2, forward, micro-batch 0."""
    microbatch = int(timeline.microbatches[index])
    kind = Kind(int(timeline.kinds[index]))
    return str(Action(int(timeline.stages[index]), kind, None if microbatch < 0 else microbatch))


def format_time(value: float, unit: str | None) -> str:
    """A time for people: unit "s" scales to ms, µs, ns; None prints the number alone; others are appended."""
    if value == 0:
        return "0"
    if unit == "s":
        return format_seconds(value)
    return f"{value:.6g}" if unit is None else f"{value:.6g} {unit}"


def ticks(span: float, most: int) -> list[float]:
    """Round times from 0 to `span`, 1, 2 or 5 times a power of ten apart, at most `most` of them.

    ticks(33, 8) -> [0, 5, 10, 15, 20, 25, 30]
    """
    if span <= 0 or most < 2:
        return [0.0]
    exponent = math.floor(math.log10(span / most))
    for mantissa in (1, 2, 5, 10, 20, 50):
        step = mantissa * 10.0**exponent
        # A span a hair under a multiple of the step still reaches that tick.
        count = math.floor(span / step + 1e-9) + 1
        if count <= most:
            return [float(f"{position * step:.6g}") for position in range(count)]
    return [0.0]


def printable(text: str) -> str:
    """The text on one line, without control characters, lone surrogates and the like."""
    return "".join(character if character.isprintable() else " " for character in text)
