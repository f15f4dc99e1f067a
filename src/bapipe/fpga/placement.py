"""What lies where: weights and gradients on chip first, then activations, and the rest in DDR.

The amounts may be arrays, so that the search asks for many stages at once with the same rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from bapipe.fpga.assumptions import Parameters
from bapipe.fpga.board import Board

__all__ = ["Demand", "Spill", "ddr_bytes", "ddr_seconds", "spill", "update_seconds"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Demand:
    """Bytes that a stage keeps; scalars or arrays."""

    weights: Any
    """as many again are gradients"""
    features: Any
    """of one image"""
    images: Any
    """images whose activations are kept at once"""
    buffers: Any
    """line buffers and FIFOs, always on chip"""
    state: Any = 0.0
    """of the optimizer, touched once per global batch: in DDR where there is any"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spill:
    """Bytes on chip and in DDR; scalars or arrays."""

    weights_on: Any
    gradients_on: Any
    features_on: Any
    """of all in-flight images"""
    weights_off: Any
    gradients_off: Any
    features_off: Any
    """of all in-flight images"""
    image_off: Any
    """of the activations of one image, the bytes that go through DDR"""
    state_off: Any
    images: Any
    """in flight at once"""
    fits: Any
    """whether buffers are within the RAM and what is off chip within the DDR"""


def spill(demand: Demand, board: Board, *, on_chip: bool = True) -> Spill:
    """Place weights, then gradients, then activations on chip; `on_chip` False leaves the first two in DDR.

    Of a weight or gradient byte on chip an image saves two passes, of an activation byte 2/images, so this order
    saves most with the default parameters; the paper, too, keeps weights on chip first.
    """
    # State has no traffic to speak of, so only a board without DDR gives RAM to it.
    state_on = demand.state if board.ddr <= 0 else 0.0
    room = board.ram - demand.buffers - state_on
    free = np.maximum(room, 0.0)
    weights_on = np.minimum(demand.weights, free) if on_chip else 0.0 * free
    gradients_on = np.minimum(demand.weights, free - weights_on) if on_chip else 0.0 * free
    kept = demand.features * demand.images
    features_on = np.minimum(kept, free - weights_on - gradients_on)
    weights_off, gradients_off = demand.weights - weights_on, demand.weights - gradients_on
    features_off = kept - features_on
    state_off = demand.state - state_on
    off = weights_off + gradients_off + features_off + state_off
    return Spill(
        weights_on=weights_on,
        gradients_on=gradients_on,
        features_on=features_on,
        weights_off=weights_off,
        gradients_off=gradients_off,
        features_off=features_off,
        image_off=features_off / np.maximum(demand.images, 1),
        state_off=state_off,
        images=demand.images,
        fits=(room >= 0) & (off <= board.ddr),
    )


def ddr_bytes(found: Spill, parameters: Parameters, *, reuse: int | None = None) -> Any:
    """Bytes through DDR per image. Only images in flight together can share a pass."""
    shared = np.minimum(parameters.reuse if reuse is None else reuse, np.maximum(found.images, 1))
    return (
        parameters.weight_reads * found.weights_off + parameters.gradient_passes * found.gradients_off
    ) / shared + parameters.feature_passes * found.image_off


def ddr_seconds(found: Spill, board: Board, parameters: Parameters, *, reuse: int | None = None) -> Any:
    """D: seconds of DDR traffic per image; infinite where there is traffic and no DDR."""
    return _seconds(ddr_bytes(found, parameters, reuse=reuse), board, parameters)


def update_seconds(found: Spill, board: Board, parameters: Parameters) -> Any:
    """The optimizer step of what lies in DDR: weights read and written, gradients read, state read and written."""
    moved = 2 * found.weights_off + found.gradients_off + 2 * found.state_off
    return _seconds(moved, board, parameters)


def _seconds(moved: Any, board: Board, parameters: Parameters) -> Any:
    bandwidth = board.ddr_bandwidth * parameters.ddr_efficiency
    if bandwidth > 0 and board.ddr > 0:
        return moved / bandwidth
    return np.where(np.asarray(moved) > 0, np.inf, 0.0)
