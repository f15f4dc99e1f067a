"""How the process of a rank ended, as the launcher that started it saw it. Imports no torch."""

from __future__ import annotations

import signal
from dataclasses import dataclass

__all__ = ["RankEnd", "signal_name"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """The end of one rank's process."""

    rank: int
    code: int
    """exit code; -n where signal n killed it"""
    at: float
    """seconds since the epoch"""
    told: bool = False
    """whether the launcher had sent it a signal before"""
    stopped: float = 0.0
    """seconds for which it had been stopped, where the launcher killed it for that"""
    said: str = ""
    """the last line that it wrote on standard error"""

    @property
    def killed_by(self) -> str:
        """The signal that killed it, unless the launcher had told it to end; empty: none."""
        return signal_name(-self.code) if self.code < 0 and not self.told else ""


def signal_name(number: int) -> str:
    """SIGKILL for 9; numbers that have no name here in words."""
    known = number in {int(item) for item in signal.Signals}
    return signal.Signals(number).name if known else f"signal {number}"
