"""How a run of `bapipe run` saves itself and goes on. Imports no torch, and no file format."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

from bapipe.errors import BaPipeError, nearest

__all__ = ["CHANGES", "Saving", "check_accepted"]

CHANGES = ("structure", "optimizer", "precision", "learning-rate")
"""what a run that goes on may have otherwise than its checkpoint, if that is accepted"""


def check_accepted(words: Collection[str]) -> None:
    """Refuse words that are not among `CHANGES`."""
    for word in words:
        if word not in CHANGES:
            raise BaPipeError(
                f"'{word[:40]}' cannot be accepted as changed{nearest(word, CHANGES)}; known: {', '.join(CHANGES)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Where and how often a run is saved."""

    folder: Path
    """where checkpoints are"""
    every: int | None = None
    """steps between two checkpoints; the last step is saved whatever it is. None: that one only"""
    keep: int = 2
    """complete checkpoints that stay"""
    asynchronous: bool = False
    """whether files are written while training goes on"""
    resume: bool = False
    """whether to go on from the folder's last complete checkpoint, if it has one"""
    accept_changes: tuple[str, ...] = ()
    """of `CHANGES`, what may differ from the checkpoint; what is here is used then"""

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise BaPipeError(f"--every must be at least 1 step, got {self.every}; raise it")
        if self.keep < 1:
            raise BaPipeError(f"--keep must be at least 1 checkpoint, got {self.keep}; raise it")
        check_accepted(self.accept_changes)

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due after so many steps."""
        return self.every is not None and step % self.every == 0

    def resumed(self) -> Saving:
        """The same, going on from the last checkpoint."""
        return replace(self, resume=True)
