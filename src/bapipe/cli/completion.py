"""What the shell offers for a word that is being typed: names where names are meant, and files beside them.

Functions import what they list when they are asked, so that the command starts no later for them.
"""

from __future__ import annotations

from collections.abc import Iterable

import click
from click.shell_completion import CompletionItem

__all__ = ["complete_cluster", "complete_model", "complete_schedule", "complete_simulated"]


def _items(names: Iterable[str], incomplete: str, *, files: bool = False) -> list[CompletionItem]:
    """The names that go on from what was typed; with `files`, the shell adds its own."""
    found = [CompletionItem(name) for name in names if name.startswith(incomplete)]
    return [*found, CompletionItem(incomplete, type="file")] if files else found


def complete_model(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    """A built-in model, or a profile or layer table."""
    from bapipe.models.builtin import BUILTIN_NAMES

    return _items(BUILTIN_NAMES, incomplete, files=True)


def complete_cluster(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    """A cluster file, or after a count and an x the types of the catalogue."""
    from bapipe.hardware.catalog import catalog_aliases, load_catalog

    begin, _, last = incomplete.rpartition("+")
    count, times, kind = last.partition("x")
    if not (times and count.isdigit()):
        return _items((), incomplete, files=True)
    before = f"{begin}+{count}x" if begin else f"{count}x"
    names = sorted({*load_catalog(), *catalog_aliases()})
    return _items((before + name for name in names), before + kind)


def complete_schedule(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    """A schedule that can be planned."""
    from bapipe.planner.request import SCHEDULE_NAMES

    return _items(SCHEDULE_NAMES, incomplete)


def complete_simulated(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    """A schedule that can be simulated, all of them, or a schedule file."""
    from bapipe.schedule.generators import SCHEDULES

    return _items(("all", *SCHEDULES), incomplete, files=True)
