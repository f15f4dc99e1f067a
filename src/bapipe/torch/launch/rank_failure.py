"""What ends a rank that was started for a run, as the failure that its launcher is told."""

from __future__ import annotations

import socket
import time

import torch.distributed as dist

from bapipe.errors import BaPipeError
from bapipe.torch.checkpoint.checkpoint_manifest import CheckpointError
from bapipe.torch.comm import LinkError
from bapipe.torch.comm.intruders import IntruderError
from bapipe.torch.health.failure import Failure
from bapipe.torch.health.rank_status import Progress, located
from bapipe.torch.stage.error_context import one_line

__all__ = ["CheckError", "failure_of"]


class CheckError(BaPipeError):
    """The run's gradients or losses are not those of one process."""


_NOT_INPUT = (CheckError, CheckpointError, IntruderError)
"""what the user's input is not to blame for"""


def failure_of(error: BaseException, rank: int, progress: Progress | None) -> Failure:
    """One line for whatever a rank raised: SystemExit and KeyboardInterrupt come from the user's code, too.

    `rank` is that of the environment, until there is a process group. What the user gave has exit code 2.
    """
    rank = dist.get_rank() if dist.is_initialized() else rank
    lost = isinstance(error, LinkError)
    where = "" if isinstance(error, BaPipeError) and not lost else _where(rank, progress)
    refused = isinstance(error, BaPipeError) and not lost and not isinstance(error, _NOT_INPUT)
    return Failure(
        rank=rank,
        by=rank,
        where=where,
        reason=one_line(error),
        lost=lost,
        code=2 if refused else 1,
        at=time.time(),
    )


def _where(rank: int, progress: Progress | None) -> str:
    at, stage = ("", None) if progress is None else progress.current[:2]
    where = located(None, rank, stages=() if stage is None else (stage,), host=socket.gethostname())
    return f"{where}, {at}" if at else where
