"""Cnn: a CNN as FPDeep's modules see it, from the same layer table that other accelerators use."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bapipe.errors import BaPipeError
from bapipe.models.layers import Layer, Model

__all__ = ["Cnn", "Geometry", "NetLayer", "make_network"]

_WITHOUT_PRODUCTS = ("pool", "norm", "activation", "add", "flatten", "dropout", "other", "layer")
_LARGEST_STRIDE = 4
_MOST_TILINGS = 2**19
"""of one layer that are tried, ten times those of the largest layers there are: every one takes memory and time"""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The loops of a convolution; a linear layer has taps, height and width of 1."""

    inputs: int
    """input channels that one output channel reads"""
    outputs: int
    taps: int
    """kernel height · width"""
    pixels: int
    """output height · width"""

    @property
    def macs(self) -> float:
        return float(self.inputs) * self.outputs * self.taps * self.pixels

    @property
    def tilings(self) -> int:
        """How many ways there are to unroll the loops, about: 2√n for each of n rounds."""
        return math.prod(2 * math.isqrt(size) for size in (self.inputs, self.outputs, self.taps))


@dataclass(frozen=True, slots=True, kw_only=True)
class NetLayer:
    """One layer; amounts are elements per image."""

    name: str
    geometry: Geometry | None
    """None: no products, or products whose loops are not known (fluid allocation only)"""
    macs: float
    """of the forward"""
    modules: tuple[str, ...]
    """of FP, EB, WG; the first layer has no EB, a pool none at all"""
    weights: int
    input: float
    """the tensor that WG reads"""
    kept: float
    """of `input`, what an earlier layer does not keep already (two branches read one tensor)"""
    output: float
    """its own output, skip values left out"""
    forward: float
    """crosses a cut after it, skip values included"""
    backward: float
    channels: int
    """steps it may be split in; 1: not at all"""
    kernel: int
    """rows of input that an output row needs"""
    rows: int
    """rows of its input; 1 for a linear layer"""
    height: int
    """rows of its output"""

    @property
    def training_macs(self) -> float:
        return self.macs * len(self.modules)

    @property
    def lead(self) -> float:
        """Share of an image that must have arrived before the first output row."""
        return min(1.0, self.kernel / self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cnn:
    """Consecutive layers."""

    name: str
    layers: tuple[NetLayer, ...]
    input_elements: float

    @property
    def training_macs(self) -> float:
        """Multiply-adds of forward, input gradient and weight gradient of one image."""
        return sum(layer.training_macs for layer in self.layers)

    @property
    def forward_share(self) -> float:
        """What of the work of an image is forward."""
        return sum(layer.macs for layer in self.layers if layer.modules) / self.training_macs

    @property
    def weights(self) -> int:
        return sum(layer.weights for layer in self.layers)


def make_network(model: Model, *, allocation: str = "integer") -> Cnn:
    """The network of a layer table; refuses layers that no FP, EB and WG modules exist for.

    A layer needs the dimensions of its convolution; a linear layer's follow from its FLOPs and outputs. With fluid
    allocation FLOPs are enough. The input that a layer keeps is the tensor before it, or the value that passes by
    where only that one fits its channels and stride (a projection stands before the branch beside it).
    """
    layers: list[NetLayer] = []
    arriving = passing = model.input_elements
    before_channels: int | None = None
    begun = False
    for layer in model.layers:
        geometry = _geometry(layer)
        macs = layer.forward_flops / 2
        _require_supported(layer, geometry, macs, allocation)
        source, again = _source(layer, before_channels, arriving, passing - arriving)
        modules = ("FP", "EB", "WG") if begun else ("FP", "WG")
        begun = begun or macs > 0
        outputs = layer.output_elements
        own = outputs if geometry is None else min(float(geometry.outputs * geometry.pixels), outputs)
        kernel, rows, height = _rows(layer, source)
        layers.append(
            NetLayer(
                name=layer.name,
                geometry=geometry if macs > 0 else None,
                macs=macs,
                modules=modules if macs > 0 else (),
                weights=0 if layer.shares_weights_with else layer.parameters,
                input=source,
                kept=0.0 if again else source,
                output=own,
                forward=outputs,
                backward=outputs if layer.error_elements is None else layer.error_elements,
                channels=layer.split.channels if layer.split is not None and macs > 0 else 1,
                kernel=kernel,
                rows=rows,
                height=height,
            )
        )
        arriving, passing = own, outputs
        before_channels = geometry.outputs if geometry is not None else before_channels
    network = Cnn(name=model.name, layers=tuple(layers), input_elements=model.input_elements)
    if not network.training_macs > 0:
        raise BaPipeError(f"model '{model.name[:60]}' has no convolution or linear layer; nothing runs on DSPs")
    return network


def _require_supported(layer: Layer, geometry: Geometry | None, macs: float, allocation: str) -> None:
    if geometry is not None and geometry.tilings > _MOST_TILINGS:
        raise BaPipeError(
            f"layer '{layer.name[:60]}' has {geometry.inputs:,} input channels, {geometry.outputs:,} output "
            f"channels and {geometry.taps:,} kernel taps, too many for the FPGA model; correct its FLOPs"
        )
    if geometry is not None or (macs == 0 and layer.kind in _WITHOUT_PRODUCTS):
        return
    known = layer.kind in ("conv", "linear", "block")
    if known and allocation == "fluid":
        return
    if known:
        raise BaPipeError(
            f"layer '{layer.name[:60]}' has no convolution dimensions; give conv = [in, out, kernel, height, "
            "width] in a layer table, or --assume allocation=fluid, which needs FLOPs only"
        )
    raise BaPipeError(
        f"layer '{layer.name[:60]}' is of kind {layer.kind}, which the FPGA model has no modules for; "
        "it supports conv, linear and pool"
    )


def _geometry(layer: Layer) -> Geometry | None:
    macs = layer.forward_flops / 2
    if layer.conv is not None:
        inputs, outputs, kernel, height, width = layer.conv
        # A captured kernel of 1 × 7 is distinguished from 7 × 7 by its FLOPs.
        taps = macs / (inputs * outputs * height * width)
        whole = max(1, round(taps)) if taps > 0 and abs(taps - round(taps)) < 1e-6 else kernel**2
        return Geometry(inputs, outputs, whole, height * width)
    if layer.kind == "linear" and layer.split is not None and macs > 0:
        read = macs / layer.split.channels
        if read >= 1 and abs(read - round(read)) < 1e-6:
            return Geometry(round(read), layer.split.channels, 1, 1)
    return None


def _source(layer: Layer, channels: int | None, arriving: float, carried: float) -> tuple[float, bool]:
    """The elements of the tensor that a layer reads, and whether an earlier layer keeps the same one."""
    if layer.conv is None or channels is None or channels == layer.conv[0] or carried <= 0:
        return arriving, False
    inputs, _, _, height, width = layer.conv
    stride = (carried / (inputs * height * width)) ** 0.5
    fits = 0.8 <= stride <= _LARGEST_STRIDE * 1.2 and abs(stride - round(stride)) < 0.25
    return (carried, True) if fits else (arriving, False)


def _rows(layer: Layer, source: float) -> tuple[int, int, int]:
    """Kernel, input rows and output rows; a layer without known rows takes a whole image at once."""
    if layer.conv is None:
        return 1, 1, 1
    inputs, _, kernel, height, width = layer.conv
    scale = max(1.0, (source / (inputs * height * width)) ** 0.5)
    # Grouped convolutions read more channels than one output does; no stride is that long.
    rows = height * scale if scale <= _LARGEST_STRIDE * 1.2 else height
    return kernel, max(1, round(rows)), height
