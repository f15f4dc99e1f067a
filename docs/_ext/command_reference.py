"""The command line as pages: `reference/commands` gets a section per command, made from the commands themselves.

A page that has the line TREE gets a list of all commands there, one that has PLACE gets them as Markdown: what
`--help` says, with every option as a target that other pages can lead to. So the page cannot differ from the
program.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator

import click
from sphinx.application import Sphinx

from bapipe.cli import cli

__all__ = ["PLACE", "TREE", "commands", "reference", "setup", "tree"]

PLACE = "<!-- commands -->"
TREE = "<!-- tree -->"


def commands() -> Iterator[tuple[str, click.Command, click.Context]]:
    """(full name, command, its context) of every command, groups left out and their members let in."""
    top = click.Context(cli, info_name="bapipe", **cli.context_settings)
    yield from _below(cli, top)


def _below(group: click.Group, context: click.Context) -> Iterator[tuple[str, click.Command, click.Context]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        own = click.Context(command, info_name=name, parent=context)
        if isinstance(command, click.Group):
            yield from _below(command, own)
        else:
            yield own.command_path, command, own


def reference() -> str:
    """All commands as Markdown."""
    return "\n".join(_section(*found) for found in commands())


def tree() -> str:
    """Every command in a line of its own, with what it is for."""
    found = [(path, command.get_short_help_str(limit=90)) for path, command, _ in commands()]
    width = max(len(path) for path, _ in found)
    return "\n".join(["```text", *(f"{path:{width}}  {words}" for path, words in found), "```"])


def _section(path: str, command: click.Command, context: click.Context) -> str:
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    lines = [f"## {path}", "", "```text", usage, "```", "", *_help(command), f"```{{program}} {path}", "```", ""]
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context) if isinstance(parameter, click.Option) else None
        if record is not None:
            names, text = record
            lines += [f"````{{option}} {names}", _escaped(text), "````", ""]
    return "\n".join(lines)


def _help(command: click.Command) -> Iterator[str]:
    """Paragraphs as text; what stands after a \\b, such as examples, as it is."""
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        if not paragraph.startswith("\b"):
            yield from (_escaped(" ".join(paragraph.split())), "")
            continue
        title, _, rest = paragraph.removeprefix("\b\n").partition("\n")
        yield from (title, "", "```text", textwrap.dedent(rest), "```", "")


def _escaped(text: str) -> str:
    """Text that Markdown leaves alone."""
    return "".join(f"\\{character}" if character in "\\`*_[]<>$" else character for character in text)


def _fill(app: Sphinx, docname: str, source: list[str]) -> None:  # noqa: ARG001
    if TREE in source[0]:
        source[0] = source[0].replace(TREE, tree())
    if PLACE in source[0]:
        source[0] = source[0].replace(PLACE, reference())


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", _fill)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
