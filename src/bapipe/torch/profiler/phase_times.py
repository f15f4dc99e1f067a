"""How long the phases of a longer piece of work took."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from bapipe.units import format_seconds

__all__ = ["PhaseTimes"]


class PhaseTimes:
    """Seconds of each phase, in the order in which they began."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """What is within is this phase; one that comes again is added."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun

    def __str__(self) -> str:
        return ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in self.seconds.items())
