"""Units: every place where the network may be cut, and what the stage between two such places needs.

A position p cuts before unit p; stage (u, v) holds units u to v − 1. All amounts are per image. The functions take
arrays of positions, so that the search asks for all stages that start anywhere in one call.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bapipe.costs.segments import Unit
from bapipe.fpga.assumptions import Parameters
from bapipe.fpga.board import Board
from bapipe.fpga.cnn import Cnn
from bapipe.fpga.placement import Demand

__all__ = ["Units", "line_buffer", "make_units"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Units:
    """The network cut as finely as the parameters allow; sums run over units or layers from the start."""

    network: Cnn
    units: tuple[Unit, ...]
    layer: Ints
    """[unit] its layer"""
    slice: Ints
    """[unit] how many slices of its layer come before it"""
    slices: Ints
    """[layer]"""
    macs: Floats
    """[position] of training, before it"""
    weights: Floats
    """[position] elements before it"""
    kept: Floats
    """[layer + 1] elements that layers before it keep"""
    entry: Floats
    """[layer] elements that a stage starting in it keeps on top"""
    buffers: Floats
    """[layer + 1] elements of line buffers of layers before it"""
    lead: Floats
    """[layer + 1] shares of an image that layers before it wait for"""
    forward: Floats
    """[position] elements that cross a cut there"""
    backward: Floats

    def __len__(self) -> int:
        return len(self.units)

    def stage_macs(self, u: Ints, v: Ints) -> Floats:
        found: Floats = self.macs[v] - self.macs[u]
        return found

    def fill(self, u: Ints, v: Ints) -> Floats:
        """δ: image times until the last of the stage's layers starts."""
        found: Floats = self.lead[self.layer[v - 1] + 1] - self.lead[self.layer[u] + 1]
        return found

    def demand(self, u: Ints, v: Ints, *, images: int, board: Board, copies: float) -> Demand:
        """Bytes that the stage keeps with so many in-flight images and `copies` of optimizer state."""
        first, last = self.layer[u], self.layer[v - 1]
        weights = (self.weights[v] - self.weights[u]) * board.element
        return Demand(
            weights=weights,
            features=(self.kept[last + 1] - self.kept[first] + self.entry[first]) * board.element,
            images=images,
            buffers=(self.buffers[last + 1] - self.buffers[first]) * board.element,
            state=copies * weights,
        )


def make_units(network: Cnn, parameters: Parameters) -> Units:
    """Cut every layer that may be split into slices, channels dealt as evenly as they go."""
    units: list[Unit] = []
    for index, layer in enumerate(network.layers):
        count = min(parameters.slices, layer.channels)
        channels = layer.channels if count > 1 else 1
        edges = np.unique(np.linspace(0, channels, count + 1).round().astype(int))
        units.extend(Unit(index, int(a), int(b), channels) for a, b in itertools.pairwise(edges))
    layers = network.layers
    of = np.array([unit.layer for unit in units], dtype=np.int64)
    share = np.array([unit.share for unit in units])
    slices = np.bincount(of, minlength=len(layers)).astype(np.int64)
    begin = np.concatenate([[0], np.cumsum(slices)])

    def before(values: list[float]) -> Floats:
        return np.concatenate([[0.0], np.cumsum(values)])

    forward, backward = _crossing(network, units)
    return Units(
        network=network,
        units=tuple(units),
        layer=of,
        slice=np.arange(len(units), dtype=np.int64) - begin[of],
        slices=slices,
        macs=before([layers[i].training_macs * part for i, part in zip(of, share, strict=True)]),
        weights=before([layers[i].weights * part for i, part in zip(of, share, strict=True)]),
        kept=before([layer.kept for layer in layers]),
        entry=np.array([layer.input - layer.kept for layer in layers]),
        buffers=before([line_buffer(network, index) for index in range(len(layers))]),
        lead=before([layer.lead for layer in layers]),
        forward=forward,
        backward=backward,
    )


def line_buffer(network: Cnn, index: int) -> float:
    """Elements of a layer's FIFOs: the kernel's rows and one more of its input, and of its output's gradient."""
    layer = network.layers[index]
    if not layer.modules:
        return 0.0
    rows = min(layer.kernel + 1, layer.rows)
    errors = min(layer.kernel + 1, layer.height)
    return rows * layer.input / layer.rows + errors * layer.output / layer.height


def _crossing(network: Cnn, units: list[Unit]) -> tuple[Floats, Floats]:
    """[position] elements that cross; inside a layer its input, skip values included, and the outputs so far."""
    forward, backward = [0.0], [0.0]
    for unit in units:
        layer = network.layers[unit.layer]
        ahead, behind = layer.forward, layer.backward
        if unit.stop < unit.of:
            before = network.layers[unit.layer - 1] if unit.layer else None
            done = unit.stop / unit.of * layer.output
            # The image itself has no error; everything else that enters has one.
            ahead = (network.input_elements if before is None else before.forward) + done
            behind = (0.0 if before is None else before.backward) + done
        forward.append(ahead)
        backward.append(behind)
    forward[-1] = backward[-1] = 0.0
    return np.array(forward), np.array(backward)
