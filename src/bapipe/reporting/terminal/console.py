"""The one console that commands print to."""

from __future__ import annotations

from rich.console import Console

__all__ = ["terminal"]


def terminal(*, stderr: bool = False) -> Console:
    """A console that prints every text as it is.

    Names of models, layers, nodes and files come from users: `[/bold]` or `:smile:` in one of them is no markup.
    """
    return Console(highlight=False, markup=False, emoji=False, stderr=stderr)
