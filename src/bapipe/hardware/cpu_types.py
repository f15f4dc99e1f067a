"""Names of CPU accelerator types: a rank of one thread is `cpu-core`, one of N threads `cpu-Ncore`."""

from __future__ import annotations

import re

from bapipe.hardware.slowed_types import usual_type

__all__ = ["cpu_threads", "cpu_type"]

_NAME = re.compile(r"cpu-([0-9]{1,4})?core")


def cpu_type(threads: int) -> str:
    """The type of a CPU rank with so many threads."""
    return "cpu-core" if threads == 1 else f"cpu-{threads}core"


def cpu_threads(name: str) -> int | None:
    """The threads that a type's name tells; None where it tells none."""
    match = _NAME.fullmatch(usual_type(name))
    return None if match is None else int(match[1] or 1)
