"""All ranks come to the same result about a checkpoint: one decides for all, or each tries and all compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from bapipe.errors import BaPipeError
from bapipe.torch.checkpoint.checkpoint_folder import disk_problem
from bapipe.torch.checkpoint.checkpoint_manifest import CheckpointError
from bapipe.torch.comm import guarded

__all__ = ["RankConsensus"]

T = TypeVar("T")


class RankConsensus:
    """Collective: every rank of the process group calls the same method in the same order."""

    def __init__(self, group: dist.ProcessGroup | None, folder: Path) -> None:
        """`folder` is where checkpoints are, for what is said of its disk."""
        self.group = group
        self._folder = folder
        self._rank = dist.get_rank()

    def decided(self, decide: Callable[[], T]) -> T:
        """What rank 0 decides, on all ranks; a CheckpointError where the disk does not let it."""
        found: list[Any] = [None, None]
        if self._rank == 0:
            try:
                found[0] = decide()
            except CheckpointError as error:
                found[1] = error
            except BaPipeError as error:
                found[1] = BaPipeError(str(error))
            except OSError as error:
                found[1] = CheckpointError(disk_problem(error, self._folder))
        with guarded(None):
            dist.broadcast_object_list(found, src=0, group=self.group)
        if found[1] is not None:
            raise found[1]
        result: T = found[0]
        return result

    def attempted(self, act: Callable[[], None]) -> str:
        """Do something on all ranks; what is wrong with the checkpoint, the same on all, or "".

        Raises, on all ranks, what else is wrong on one.
        """
        mine: tuple[str, str] = ("", "")
        failed: Exception | None = None
        try:
            act()
        except CheckpointError as error:
            mine = ("damaged", str(error))
        except BaPipeError as error:
            mine = ("refused", str(error))
        except Exception as error:
            failed = error
            mine = ("refused", f"rank {self._rank} cannot load: {type(error).__name__}: {error}")
        everywhere = self.from_all(mine)
        if failed is not None:
            raise failed
        for kind, text in everywhere:
            if kind == "refused":
                raise BaPipeError(text)
        return next((text for kind, text in everywhere if kind), "")

    def from_all(self, value: T) -> list[T]:
        """Every rank's value, on every rank."""
        everywhere: list[T] = [value] * dist.get_world_size()
        with guarded(None):
            dist.all_gather_object(everywhere, value, group=self.group)
        return everywhere

    def on_first(self, value: T) -> list[T] | None:
        """Every rank's value, on rank 0; None on the others."""
        everywhere = [value] * dist.get_world_size() if self._rank == 0 else None
        with guarded(None):
            dist.gather_object(value, everywhere, group=self.group)
        return everywhere
