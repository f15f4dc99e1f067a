"""How each kind of action looks: its name, its fill on a terminal, its colour.

The colours are Okabe and Ito's, which people with any colour blindness tell apart. Each comes with its own ink,
so that neither a dark nor a light terminal changes the contrast.
"""

from __future__ import annotations

from dataclasses import dataclass

from bapipe.schedule.actions import Kind

__all__ = ["LOOKS", "Look"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """How one kind of action is drawn."""

    name: str
    fill: str
    """the character that pads its label"""
    color: str
    """what is behind the label, as #rrggbb"""
    ink: str = "#000000"
    """the label's colour"""


LOOKS: dict[Kind, Look] = {
    Kind.F: Look(name="forward", fill="─", color="#56b4e9"),
    Kind.B: Look(name="backward", fill="═", color="#e69f00"),
    Kind.I: Look(name="input gradient", fill="━", color="#d55e00"),
    Kind.W: Look(name="weight gradient", fill="╍", color="#009e73"),
    Kind.R: Look(name="recompute", fill="┄", color="#f0e442"),
    Kind.A: Look(name="all-reduce", fill="▒", color="#cc79a7"),
    Kind.U: Look(name="optimizer step", fill="░", color="#0072b2", ink="#ffffff"),
}
"""For every kind its look, in the order of legends."""
