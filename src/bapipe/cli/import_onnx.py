"""`bapipe import-onnx`: an ONNX graph as a layer table."""

from __future__ import annotations

import click

__all__ = ["import_onnx_command"]


@click.command("import-onnx")
@click.argument("onnx_file", type=click.Path(dir_okay=False))
@click.option(
    "--dim",
    "dimensions",
    multiple=True,
    metavar="NAME=N",
    help="Size of a free dimension, such as sequence=128; repeatable.",
)
@click.option("-o", "--out", required=True, type=click.Path(dir_okay=False), help="Write the layer table, .toml.")
def import_onnx_command(onnx_file: str, dimensions: tuple[str, ...], out: str) -> None:
    """Write the layers of ONNX_FILE as a layer table, which `bapipe plan` takes.

    FLOPs, parameters and activations are those of the graph's nodes, for one sample: the first dimension of the
    first input is the batch. Layers end where one value crosses. Needs the package onnx.

    \b
    Example:
      bapipe import-onnx model.onnx --dim sequence=128 -o layers.toml
      bapipe plan layers.toml --cluster 4xv100 --global-batch 256
    """
    from bapipe.errors import BaPipeError
    from bapipe.io.files import write_text
    from bapipe.models.layer_table import layer_table_toml
    from bapipe.models.onnx_graph import read_onnx
    from bapipe.models.onnx_layers import onnx_model

    if not out.lower().endswith(".toml"):
        raise BaPipeError(f"a layer table is a .toml file, got -o {out[:100]}; give for example -o layers.toml")
    sizes: dict[str, int] = {}
    for text in dimensions:
        name, equals, number = text.rpartition("=")
        if not equals or not name or not number.isdecimal() or len(number) > 9:
            raise BaPipeError(f"--dim looks like sequence=128, got '{text[:60]}'")
        sizes[name] = int(number)
    model = onnx_model(read_onnx(onnx_file, dimensions=sizes))
    write_text(out, layer_table_toml(model))
    flops = sum(layer.forward_flops for layer in model.layers)
    count = len(model.layers)
    click.echo(
        f"{count} layer{'s' if count > 1 else ''}, {model.parameters:,} parameters, {flops / 1e9:.3g} GFLOP "
        "forward a sample"
    )
    click.echo(f"wrote {out}")
