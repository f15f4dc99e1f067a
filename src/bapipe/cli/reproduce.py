"""`bapipe reproduce`: the paper's tables beside ours."""

from __future__ import annotations

import json
from typing import Any

import click

from bapipe.cli.values import plain_number
from bapipe.errors import BaPipeError, nearest
from bapipe.io.files import write_text

__all__ = ["reproduce_command"]

_NAMES = ("table1", "table2", "table3", "table4", "table5", "table6")


@click.command("reproduce")
@click.argument("table")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: an object per table, a list for all.")
@click.option("--measured", is_flag=True, help="Show beside them what was measured on slices of one GPU.")
@click.option(
    "--results",
    type=click.Path(dir_okay=False),
    help="Where that stands.  [default: benchmarks/slices/result.json of the checkout]",
)
@click.option("--check", is_flag=True, help="Exit 1, naming them, if figures are outside their limits.")
@click.option("--markdown", type=click.Path(dir_okay=False), help="Write a Markdown page instead of printing.")
def reproduce_command(
    table: str, as_json: bool, measured: bool, results: str | None, check: bool, markdown: str | None
) -> None:
    """Compute TABLE of the paper, table1 to table6 or all, and set it beside what the paper prints.

    \b
    Examples:
      bapipe reproduce table3
      bapipe reproduce all --check
      bapipe reproduce table4 --json
    """
    if table != "all" and table not in _NAMES:
        raise BaPipeError(
            f"unknown table '{table[:40]}'{nearest(table, (*_NAMES, 'all'))}; choose table1 to table6 or all"
        )
    if results is not None and not measured:
        raise BaPipeError("--results is what --measured shows; add --measured")
    if markdown is not None and (as_json or measured):
        raise BaPipeError("--markdown writes the computed tables alone; leave --json and --measured out")
    from bapipe.reproduce import TABLES
    from bapipe.reproduce.measured import measured_cells, read_measured

    found = read_measured(results) if measured else None
    tables = [TABLES[name]() for name in (_NAMES if table == "all" else (table,))]
    extra = {item.name: () if found is None else measured_cells(item.name, found) for item in tables}
    if markdown is not None:
        from bapipe.reproduce.render_tables import markdown_page

        write_text(markdown, markdown_page(tables))
        click.echo(f"wrote {markdown}")
    elif as_json:
        values = [_values(item, extra[item.name]) for item in tables]
        click.echo(json.dumps(values if table == "all" else values[0], indent=1, allow_nan=False))
    else:
        _print(tables, extra, None if found is None else found.environment)
    failures = [failure for item in tables for failure in item.failures]
    if check and failures:
        for failure in failures:
            click.echo(f"outside its limit: {failure}", err=True)
        raise click.exceptions.Exit(1)


def _values(table: Any, extra: Any) -> Any:
    import dataclasses

    from bapipe.reproduce import table_values

    return plain_number(table_values(dataclasses.replace(table, cells=(*table.cells, *extra))))


def _print(tables: Any, extra: Any, environment: str | None) -> None:
    from bapipe.reporting.terminal.console import terminal
    from bapipe.reproduce.render_tables import render_table

    console = terminal()
    for table in tables:
        console.print(render_table(table, extra[table.name]))
    if environment is not None:
        console.print(f"measured: {environment}")
