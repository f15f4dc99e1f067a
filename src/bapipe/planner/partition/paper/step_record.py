"""A record of what an exploration did, for --explain."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of the exploration."""

    name: str
    ran: bool
    numbers: str
    """what it decided on"""
    change: str
    """what it changed"""
