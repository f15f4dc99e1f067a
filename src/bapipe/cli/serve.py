"""`bapipe serve`: a page on this machine that plans while knobs are turned."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click

from bapipe.errors import BaPipeError

__all__ = ["serve_command"]


@click.command("serve")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Other addresses let others in.",
)
@click.option("--port", type=click.IntRange(0, 65535), default=8765, show_default=True, help="0: any free one.")
@click.option("--folder", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="Whose profiles, layer tables and cluster files can be picked.")  # fmt: skip
@click.option("--open", "open_page", is_flag=True, help="Open the page in a browser.")
def serve_command(host: str, port: int, folder: Path | None, open_page: bool) -> None:
    """Serve a page that plans built-in models, or the profiles of a folder, while you turn the knobs.

    Nothing leaves this machine: only 127.0.0.1 is served unless --host says otherwise, and the page asks no one
    else.

    \b
    Examples:
      bapipe serve --open
      bapipe serve --folder profiles --port 9000
    """
    if any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise BaPipeError("the page needs two more packages; run: pip install 'bapipe[serve]'")
    from bapipe.serve.app import ServeSettings
    from bapipe.serve.own_files import list_folder
    from bapipe.serve.server import run_server

    own = None if folder is None else folder.resolve()
    list_folder(own)
    run_server(ServeSettings(host=host, folder=own), port=port, open_page=open_page, say=click.echo)
