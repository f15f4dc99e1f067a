"""What the library logs, as lines of a command. Imports no torch."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

__all__ = ["print_log"]

_LIBRARY = logging.getLogger("bapipe")


class _Lines(logging.Handler):
    """Warnings and what is marked as lasting on standard error; what goes on, if somebody shows it, to
    `progress`."""

    def __init__(self, progress: Callable[[str], None] | None) -> None:
        super().__init__(logging.WARNING if progress is None else logging.INFO)
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            # Looked up every time: standard error may have been redirected since.
            print(f"bapipe: {record.getMessage()}", file=sys.stderr, flush=True)
        elif getattr(record, "lasting", False):
            print(record.getMessage(), file=sys.stderr, flush=True)
        elif self._progress is not None:
            self._progress(record.getMessage())


def print_log(progress: Callable[[str], None] | None = None) -> None:
    """Have this process print what the library logs, in place of what it was printed by before.

    Without `progress` only warnings are; with it, it is called with every line at INFO.
    """
    for handler in [item for item in _LIBRARY.handlers if isinstance(item, _Lines)]:
        _LIBRARY.removeHandler(handler)
    _LIBRARY.addHandler(_Lines(progress))
    _LIBRARY.setLevel(logging.WARNING if progress is None else logging.INFO)
    _LIBRARY.propagate = False
