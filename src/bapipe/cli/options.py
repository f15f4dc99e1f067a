"""Options whose names changed: the field's name is shown, and the old one keeps working without being shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

__all__ = ["OLD_NAMES", "RenamedOption", "renamed"]

OLD_NAMES = {
    "--global-batch": "--minibatch",
    "--in-flight": "--cap",
    "--micro-batch": "--microbatch",
    "--micro-batches": "--microbatches",
    "--optimizer-step": "--update",
}
"""an option's name -> what it was called before"""


class RenamedOption(click.Option):
    """An option that the parser also knows by its old name; help, usage and messages have the new one alone."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        shown = self.opts
        self.opts = [*shown, *(OLD_NAMES[name] for name in shown if name in OLD_NAMES)]
        try:
            super().add_to_parser(parser, ctx)
        finally:
            self.opts = shown


def renamed(name: str, *declarations: str, **attributes: Any) -> Callable[[Any], Any]:
    """`click.option` for a name in OLD_NAMES."""
    assert name in OLD_NAMES
    return click.option(name, *declarations, cls=RenamedOption, **attributes)
