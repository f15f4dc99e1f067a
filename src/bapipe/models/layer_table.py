"""The one reader and writer of layer tables: a model written down in TOML (docs/reference/layer-table.md)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bapipe.errors import FileFormatError, nearest
from bapipe.io.decode import decode
from bapipe.io.files import load_toml, toml_string
from bapipe.models.layers import Layer, Model, Split

__all__ = ["LAYERS_SCHEMA", "layer_table_toml", "read_layer_table"]

LAYERS_SCHEMA = "bapipe.layers/1"
_LARGEST_DIMENSION = 10**6
_LARGEST_AMOUNT = 10**18
"""more is taken for a slip of the pen"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerEntry:
    """[[layers]]; None takes the default that the reference page gives."""

    name: str
    kind: str | None = None
    conv: tuple[int, ...] | None = None
    forward_flops: float | None = None
    parameters: int | None = None
    output_elements: float | None = None
    saved_elements: float | None = None
    moved_elements: float | None = None
    elementwise_elements: float | None = None
    error_elements: float | None = None
    weight_flops: float | None = None
    weight_reads: float = 1.0
    kernels: int = 1
    shares_weights_with: str | None = None
    split: int | None = None
    split_by: str = "output channels"


@dataclass(frozen=True, slots=True, kw_only=True)
class _TableFile:
    schema: str
    name: str
    input_elements: float
    layers: tuple[_LayerEntry, ...]
    description: str = ""


_AMOUNTS = (
    "forward_flops", "parameters", "output_elements", "saved_elements", "moved_elements", "elementwise_elements",
    "error_elements", "weight_flops", "weight_reads",
)  # fmt: skip


def read_layer_table(path: str | Path) -> Model:
    """The model of a layer table; every mistake is refused with the layer it stands in."""
    data = load_toml(path)
    found = data.get("schema")
    if found != LAYERS_SCHEMA:
        got = "nothing" if found is None else f"'{str(found)[:60]}'"
        raise FileFormatError(f'{path}: schema must be "{LAYERS_SCHEMA}", got {got}; correct the first line')
    table = decode(_TableFile, data, where=str(path))
    if not table.layers:
        raise FileFormatError(f"{path} has no layers; add [[layers]]")
    if table.input_elements < 0:
        raise FileFormatError(
            f"{path}: input_elements must be at least 0, got {table.input_elements:g}; correct it"
        )
    layers: list[Layer] = []
    arriving = table.input_elements
    for index, entry in enumerate(table.layers):
        where = f"{path}: layers[{index}] '{entry.name[:60]}'"
        layer = _layer(entry, arriving, earlier=[item.name for item in layers], where=where)
        layers.append(layer)
        arriving = layer.output_elements
    return Model(
        name=table.name,
        layers=tuple(layers),
        input_elements=table.input_elements,
        description=table.description or f"layer table {Path(path).name}",
    )


def _check(entry: _LayerEntry, *, earlier: list[str], where: str) -> None:
    if not entry.name:
        raise FileFormatError(f"{where}: a layer needs a name; add it")
    if entry.name in earlier:
        raise FileFormatError(f"{where}: an earlier layer has this name; rename one")
    for name in _AMOUNTS:
        value = getattr(entry, name)
        if value is not None and not 0 <= value <= _LARGEST_AMOUNT:
            raise FileFormatError(f"{where}: {name} must be from 0 to 1e18, got {str(value)[:40]}; correct it")
    if entry.kernels < 1:
        raise FileFormatError(f"{where}: kernels must be at least 1, got {entry.kernels}; correct it")
    if entry.conv is not None and (
        len(entry.conv) != 5 or not 1 <= min(entry.conv) <= max(entry.conv) <= _LARGEST_DIMENSION
    ):
        raise FileFormatError(
            f"{where}: conv must be [input channels, output channels, kernel, height, width], each from 1 to 1e6; "
            f"got {str(list(entry.conv))[:60]}"
        )
    if entry.shares_weights_with is not None and entry.shares_weights_with not in earlier:
        raise FileFormatError(
            f"{where}: shares_weights_with names no earlier layer: '{entry.shares_weights_with[:60]}'"
            f"{nearest(entry.shares_weights_with, earlier)}; correct it"
        )


def _required(value: float | None, name: str, *, where: str) -> float:
    if value is None:
        raise FileFormatError(f"{where}: '{name}' is missing; add it, or conv = [in, out, kernel, height, width]")
    return value


def _part(value: float | None, whole: float, name: str, of: str, *, where: str) -> float | None:
    if value is not None and value > whole:
        raise FileFormatError(f"{where}: {name} must be at most {of}, {whole:g}; got {value:g}")
    return value


def _split(entry: _LayerEntry, *, where: str) -> Split | None:
    channels = entry.split
    if channels is None:
        channels = entry.conv[1] if entry.conv is not None and entry.conv[1] > 1 else 0
    if channels == 0:
        return None
    if channels < 2:
        raise FileFormatError(
            f"{where}: split must be 0 (never) or at least 2 channels, got {channels}; correct it"
        )
    return Split(channels=channels, by=entry.split_by)


def _layer(entry: _LayerEntry, arriving: float, *, earlier: list[str], where: str) -> Layer:
    _check(entry, earlier=earlier, where=where)
    flops, parameters, output = entry.forward_flops, entry.parameters, entry.output_elements
    if entry.conv is not None:
        inputs, outputs, kernel, height, width = entry.conv
        weights = inputs * outputs * kernel**2
        flops = 2.0 * weights * height * width if flops is None else flops
        parameters = weights + outputs if parameters is None else parameters
        output = float(outputs * height * width) if output is None else output
    flops = _required(flops, "forward_flops", where=where)
    output = _required(output, "output_elements", where=where)
    if parameters is None:
        raise FileFormatError(f"{where}: 'parameters' is missing; add it, 0 if there are none")
    saved_activations = arriving if entry.saved_elements is None else entry.saved_elements
    moved = arriving + output + saved_activations if entry.moved_elements is None else entry.moved_elements
    return Layer(
        name=entry.name,
        kind=entry.kind or ("layer" if entry.conv is None else "conv"),
        forward_flops=flops,
        parameters=parameters,
        output_elements=output,
        saved_elements=saved_activations,
        moved_elements=moved,
        elementwise_elements=_part(
            entry.elementwise_elements, moved, "elementwise_elements", "moved_elements", where=where
        ),
        error_elements=entry.error_elements,
        weight_flops=_part(entry.weight_flops, flops, "weight_flops", "forward_flops", where=where),
        weight_reads=entry.weight_reads,
        kernels=entry.kernels,
        shares_weights_with=entry.shares_weights_with,
        split=_split(entry, where=where),
        conv=entry.conv,
    )


def layer_table_toml(model: Model) -> str:
    """The model as the text of a layer table. Read back, it is the same model."""
    lines = [
        f"schema = {toml_string(LAYERS_SCHEMA)}",
        f"name = {toml_string(model.name)}",
        f"input_elements = {_number(model.input_elements)}",
    ]
    lines += [f"description = {toml_string(model.description)}"] if model.description else []
    for layer in model.layers:
        lines += ["", "[[layers]]", f"name = {toml_string(layer.name)}", f"kind = {toml_string(layer.kind)}"]
        if layer.conv is not None:
            lines.append(f"conv = {list(layer.conv)}")
        for name in (*_AMOUNTS, "kernels"):
            value = getattr(layer, name)
            if value is not None:
                lines.append(f"{name} = {_number(value)}")
        if layer.shares_weights_with is not None:
            lines.append(f"shares_weights_with = {toml_string(layer.shares_weights_with)}")
        if layer.split is not None:
            lines += [f"split = {layer.split.channels}", f"split_by = {toml_string(layer.split.by)}"]
        elif layer.conv is not None:
            lines.append("split = 0")
    return "\n".join([*lines, ""])


def _number(value: float) -> str:
    """Whole numbers without a point, all others with every digit."""
    return str(int(value)) if float(value).is_integer() else repr(value)
