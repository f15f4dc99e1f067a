"""`bapipe checkpoint`: what checkpoints there are, whether they are whole, and one as a safetensors file."""

from __future__ import annotations

import importlib.util
import json
from typing import TYPE_CHECKING

import click

from bapipe.errors import BaPipeError
from bapipe.units import format_bytes

if TYPE_CHECKING:
    from bapipe.torch.checkpoint.checkpoint_survey import CheckpointSummary, Verified

__all__ = ["checkpoint_group", "export_command", "list_command", "verify_command"]


@click.group("checkpoint")
def checkpoint_group() -> None:
    """List, verify and export checkpoints."""


@checkpoint_group.command("list")
@click.argument("folder", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per checkpoint.")
def list_command(folder: str, as_json: bool) -> None:
    """List the checkpoints in FOLDER, the latest first.

    The manifest and the sizes of its files show whether one is complete; verify reads the files.

    \b
    Example:
      bapipe checkpoint list saved
    """
    from bapipe.torch.checkpoint.checkpoint_survey import find_checkpoints, summarise, unfinished_in

    found = [summarise(path) for path in find_checkpoints(folder)]
    for item in found if as_json else ():
        click.echo(json.dumps(_values(item)))
    if as_json:
        return
    rows: list[tuple[str, ...]] = [("step", "written (UTC)", "size", "state", "model", "optimizer", "precision")]
    rows += [_row(item) for item in found]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for item in found:
        if item.problem is not None:
            click.echo(item.problem)
    for path in unfinished_in(folder):
        click.echo(f"{path} is being written, or was left by a run that was killed; the next save removes it")


def _values(item: CheckpointSummary) -> dict[str, object]:
    return {
        "path": str(item.path),
        "step": item.step,
        "written": None if item.written is None else item.written.isoformat(),
        "size": item.size,
        "state": item.state,
        "problem": item.problem,
        "model": item.model,
        "optimizer": item.optimizer,
        "precision": item.precision,
        "saved_under": item.saved_under,
    }


def _row(item: CheckpointSummary) -> tuple[str, ...]:
    return (
        "?" if item.step is None else str(item.step),
        "–" if item.written is None else f"{item.written:%Y-%m-%d %H:%M:%S}",
        format_bytes(item.size),
        item.state,
        item.model or "–",
        (item.optimizer or "–").rpartition(".")[2],
        item.precision or "–",
    )


@checkpoint_group.command("verify")
@click.argument("folder", type=click.Path())
@click.option("--step", type=int, help="Of this step only.  [default: all]")
def verify_command(folder: str, step: int | None) -> None:
    """Read all files of the checkpoints in FOLDER and compare them with their checksums.

    Exits with 1 if one is damaged or incomplete, and names its files.

    \b
    Example:
      bapipe checkpoint verify saved --step 100
    """
    from bapipe.torch.checkpoint.checkpoint_survey import find_checkpoints, verify_files

    whole = True
    for path in find_checkpoints(folder, step=step):
        found = verify_files(path)
        whole = whole and not found.damaged
        for line in _verified(found):
            click.echo(line)
    if not whole:
        raise click.exceptions.Exit(1)


def _verified(found: Verified) -> list[str]:
    if found.damaged:
        return list(found.damaged.values())
    how = "all as they were written" if found.hashed else "of the right size; they have no checksums to verify by"
    return [f"{found.path}: {found.files} files, {format_bytes(found.size)}, {how}"]


@checkpoint_group.command("export")
@click.argument("checkpoint", type=click.Path())
@click.argument("out", type=click.Path(dir_okay=False))
def export_command(checkpoint: str, out: str) -> None:
    """Write the whole model of CHECKPOINT to OUT, a safetensors file with the model's own names.

    CHECKPOINT is one that bapipe run --checkpoint wrote, or a folder of them, whose last complete one is taken.

    \b
    Example:
      bapipe checkpoint export saved model.safetensors
    """
    if importlib.util.find_spec("torch") is None:
        raise BaPipeError("reading a checkpoint needs torch, which is not installed; pip install 'bapipe[torch]'")
    from bapipe.torch.checkpoint.whole_model import export_safetensors
    from bapipe.torch.launch.log_lines import print_log

    print_log()
    click.echo(f"wrote {out} from {export_safetensors(checkpoint, out)}")
