"""How a run of `bapipe run` saves itself and goes on. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from bapipe.errors import BaPipeError
from bapipe.torch.checkpoint.checkpoint_folder import checkpoints_of, latest, reason
from bapipe.torch.checkpoint.checkpoint_manifest import (
    UnknownSchemaError,
    UnreadableCheckpointError,
    read_manifest,
)

__all__ = ["Saving"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Where and how often a run is saved."""

    folder: Path
    every: int
    """steps between two checkpoints; the last step is saved whatever it is"""
    keep: int = 2
    """complete checkpoints that stay"""
    asynchronous: bool = False
    """whether files are written while training goes on"""
    resume: bool = False
    """whether to go on from the folder's last complete checkpoint, if it has one"""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise BaPipeError(f"--every must be at least 1 step, got {self.every}; raise it")
        if self.keep < 1:
            raise BaPipeError(f"--keep must be at least 1 checkpoint, got {self.keep}; raise it")

    def check(self, *, comparing: bool = False) -> None:
        """Refuse to start afresh beside another run's checkpoints, and to compare what was not all run here.

        And to go on where the last one is of a schema that this version does not know: it would be left behind.
        """
        found = latest(self.folder)
        last = next(iter(checkpoints_of(self.folder)), None)
        if last is not None and last != found:
            self._refuse_unreadable(last)
        if found is not None and not self.resume:
            raise BaPipeError(
                f"{found} is a checkpoint of another run; give --resume to go on from it, or another folder"
            )
        if found is not None and comparing:
            raise BaPipeError("--check compares a run from its first step; leave it out with --resume")

    def _refuse_unreadable(self, last: Path) -> None:
        """A damaged one is passed over by a run that resumes, and said so."""
        try:
            read_manifest(last)
        except UnknownSchemaError as error:
            raise BaPipeError(
                f"{reason(error)}; it is not replaced: use the version that wrote it, or give another folder"
            ) from None
        except UnreadableCheckpointError as error:
            if not self.resume:
                raise BaPipeError(
                    f"{reason(error)}; it is not replaced: give --resume to go on from an earlier one, or another "
                    "folder"
                ) from None

    def resumed(self) -> Saving:
        """The same, going on from the last checkpoint."""
        return replace(self, resume=True)

    def arguments(self) -> list[str]:
        """For a rank."""
        flags = {"--async": self.asynchronous, "--resume": self.resume}
        return [
            *("--checkpoint", str(self.folder), "--every", str(self.every), "--keep", str(self.keep)),
            *(name for name, wanted in flags.items() if wanted),
        ]
