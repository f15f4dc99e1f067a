"""`bapipe run` and `bapipe compare`: train by a plan, and see how true its prediction was."""

from __future__ import annotations

import json

import click

from bapipe.cli.values import plain_number
from bapipe.files import plain_values

__all__ = ["compare_command", "run_command"]


@click.command("run")
@click.argument("plan_file", type=click.Path(dir_okay=False))
@click.option("--steps", type=int, default=3, show_default=True, help="Updates to train.")
@click.option("--check", is_flag=True, help="Compare every gradient with training in one process.")
@click.option("--out", type=click.Path(dir_okay=False), help="Write run.json: losses and the recorded timeline.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of weights and data.")
@click.option("--learning-rate", type=float, default=0.01, show_default=True)
@click.option(
    "--timeout", type=float, default=300.0, show_default=True, help="Seconds before a silent rank is given up."
)
def run_command(plan_file: str, **options: object) -> None:
    """Train by PLAN_FILE on this machine, one process per rank.

    \b
    Example:
      bapipe run plan.json --steps 3 --check --out run.json
    """
    from bapipe.torch.launch import launch

    code = launch(plan_file, **options)  # type: ignore[arg-type]
    if code:
        raise click.exceptions.Exit(code)


@click.command("compare")
@click.argument("plan_file", type=click.Path(dir_okay=False))
@click.argument("run_file", type=click.Path(dir_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--trace", "trace_file", type=click.Path(dir_okay=False), help="Write both timelines as one Perfetto trace."
)
def compare_command(plan_file: str, run_file: str, as_json: bool, trace_file: str | None) -> None:
    """Show what PLAN_FILE predicted beside what RUN_FILE measured, per stage."""
    from bapipe.compare import compare, comparison_table
    from bapipe.files import write_text
    from bapipe.plan import read_plan
    from bapipe.report.trace import trace_json
    from bapipe.run_record import read_run

    plan, record = read_plan(plan_file), read_run(run_file)
    found = compare(plan, record)
    predicted, measured = found.predicted, found.measured
    if trace_file:
        write_text(trace_file, trace_json({"predicted": predicted, "measured": measured}))
    if as_json:
        figures = {
            "time": found.time,
            "bubble": found.bubble,
            "step_seconds": found.step_seconds,
            "stages": found.stages,
        }
        click.echo(json.dumps(plain_number(plain_values(figures)), indent=1, allow_nan=False))
        return
    from rich.console import Console

    from bapipe.report.text import render_text

    console = Console(highlight=False)
    width, color = max(40, console.width), console.is_terminal
    console.print(render_text(predicted, width=width, color=color, unit="s", title="predicted"))
    console.print(render_text(measured, width=width, color=color, unit="s", title="measured"))
    console.print(comparison_table(found))
    if trace_file:
        console.print(f"wrote {trace_file}", soft_wrap=True)
