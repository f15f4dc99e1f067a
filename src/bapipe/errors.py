"""Errors a user can act on. Each message says what is wrong, what was got and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "BaPipeError",
    "DeadlockError",
    "FileFormatError",
    "InfeasibleError",
    "ScheduleError",
    "first_line",
    "nearest",
]


class BaPipeError(Exception):
    """A mistake in what the user gave; the command line prints its text on one line and exits with 2."""


class FileFormatError(BaPipeError):
    """A file that cannot be read as what it should be."""


class ScheduleError(BaPipeError):
    """A schedule that breaks a rule; the text names rank and action."""


class DeadlockError(ScheduleError):
    """A schedule in which some action waits for ever."""


class InfeasibleError(BaPipeError):
    """No plan fits what was asked."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none."""
    return next((line.strip()[:200] for line in str(error).splitlines() if line.strip()), type(error).__name__)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the known name closest to `name`, or "" if none is close."""
    matches = difflib.get_close_matches(name.lower()[:100], list(known), n=1, cutoff=0.5)
    return f" (did you mean '{matches[0]}'?)" if matches else ""
