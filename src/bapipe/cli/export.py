"""`bapipe export`: a plan as another engine reads it; and, as before, a checkpoint as a safetensors file."""

from __future__ import annotations

from pathlib import Path

import click

from bapipe.errors import BaPipeError
from bapipe.exporters.targets import TARGETS
from bapipe.io.files import write_text

__all__ = ["export_plan_command"]


@click.command("export")
@click.argument("plan_file", type=click.Path())
@click.argument("checkpoint_out", required=False, type=click.Path(dir_okay=False), metavar="")
@click.option("--to", metavar="ENGINE", help=", ".join(TARGETS) + ".")
@click.option("--out", "-o", type=click.Path(dir_okay=False), help="File to write; others lie beside it.")
@click.option("--target-version", metavar="VERSION", help="Of the engine.  [default: the newest known release]")
@click.option("--strict", is_flag=True, help="Refuse where the engine cannot hold all of the plan.")
def export_plan_command(
    plan_file: str,
    checkpoint_out: str | None,
    to: str | None,
    out: str | None,
    target_version: str | None,
    strict: bool,
) -> None:
    """Write PLAN_FILE as another engine reads it, and say what of the plan that engine cannot hold.

    A whole checkpoint is written by bapipe checkpoint export CHECKPOINT OUT.

    \b
    Examples:
      bapipe export plan.json --to torch -o train.py
      bapipe export plan.json --to megatron -o layout.args --strict
      bapipe export plan.json --to torchtitan --target-version 0.2 -o parallelism.toml
    """
    if to is None:
        _export_checkpoint(plan_file, checkpoint_out, out)
        return
    if checkpoint_out is not None:
        raise BaPipeError(f"with --to the file to write is given by -o, got '{checkpoint_out[:100]}' besides")
    from bapipe.exporters.export_plan import export_plan
    from bapipe.records.plan import read_plan

    made = export_plan(read_plan(plan_file), to, out=out, version=target_version, strict=strict)
    for feature, text in made.losses.items():
        click.echo(f"warning: {TARGETS[to].title} cannot hold {feature.value}: {text}", err=True)
    for path, content in made.files.items():
        write_text(path, content)
        click.echo(f"wrote {path}")
    for note in made.notes:
        click.echo(note)


def _export_checkpoint(checkpoint: str, positional: str | None, option: str | None) -> None:
    """The form that the command had before it took plans."""
    if checkpoint.endswith(".json") and Path(checkpoint).is_file():
        raise BaPipeError(f"a plan is exported --to an engine, got none; give one of {', '.join(TARGETS)}")
    out = positional or option
    if out is None:
        raise BaPipeError(
            "give a plan.json and --to ENGINE, or a checkpoint and the safetensors file to write "
            "(bapipe checkpoint export CHECKPOINT OUT)"
        )
    from bapipe.cli.checkpoint import export_command

    export_command.callback(checkpoint, out)  # type: ignore[misc]
