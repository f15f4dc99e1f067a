"""The patterns that tell kinds of actions apart where colour does not, for SVG and canvas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bapipe.reporting.drawing.action_styles import LOOKS
from bapipe.schedule.actions import Kind

__all__ = ["MARKS", "patterns"]

MARKS = {
    Kind.F: "",
    Kind.B: "M-1,7L7,-1M-1,1L1,-1M5,7L7,5",
    Kind.I: "M-1,-1L7,7M-1,5L1,7M5,-1L7,1",
    Kind.W: "M2,3H4",
    Kind.R: "M0,1.5H6M0,4.5H6",
    Kind.A: "M1.5,0V6M4.5,0V6",
    Kind.U: "M5,.5H6",
}
"""what a kind's pattern draws over its colour, as path data in a square of 6 pixels"""


def patterns(kinds: Iterable[Kind]) -> Iterator[str]:
    """The definitions that `fill:url(#bapipe-F)` and the like refer to."""
    yield "<defs>"
    for kind in kinds:
        path = f'<path d="{MARKS[kind]}"/>' if MARKS[kind] else ""
        yield (
            f'<pattern id="bapipe-{kind.name}" width="6" height="6" patternUnits="userSpaceOnUse">'
            f'<rect width="6" height="6" fill="{LOOKS[kind].color}"/>'
            f'<g stroke="#fff" stroke-opacity=".45">{path}</g></pattern>'
        )
    yield "</defs>"
