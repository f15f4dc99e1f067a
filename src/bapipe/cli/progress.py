"""A bar with the time left, on a terminal's standard error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

__all__ = ["progress_bar"]


@contextlib.contextmanager
def progress_bar(first: str) -> Iterator[Callable[[str, float], None]]:
    """While open, a call with what is being done and the share that is done moves the bar; `first` stands there
    before the first call."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from bapipe.reporting.terminal.console import terminal

    columns = (BarColumn(), TaskProgressColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    console = terminal(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(first, total=1.0)

        def report(label: str, share: float) -> None:
            bar.update(task, completed=share, description=label)

        yield report
