"""`bapipe export`: a checkpoint as one safetensors file."""

from __future__ import annotations

import click

__all__ = ["export_command"]


@click.command("export")
@click.argument("checkpoint", type=click.Path())
@click.argument("out", type=click.Path(dir_okay=False))
def export_command(checkpoint: str, out: str) -> None:
    """Write the whole model of CHECKPOINT to OUT, a safetensors file with the model's own names.

    CHECKPOINT is one that bapipe run --checkpoint wrote, or a folder of them, whose last complete one is taken.

    \b
    Example:
      bapipe export saved model.safetensors
    """
    import importlib.util

    from bapipe.errors import BaPipeError

    if importlib.util.find_spec("torch") is None:
        raise BaPipeError("reading a checkpoint needs torch, which is not installed; pip install 'bapipe[torch]'")
    from bapipe.torch.checkpoint.whole_model import export_safetensors
    from bapipe.torch.launch.log_lines import print_log

    print_log()
    click.echo(f"wrote {out} from {export_safetensors(checkpoint, out)}")
