"""Bytes that one stage needs on its accelerator: the one place that says so."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bapipe.chain import Chain, part_costs

__all__ = ["StageBytes", "stage_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """What a stage holds, apart from gradients and optimizer state, which are copies of its weights."""

    weights: float
    """all of a layer of which it has some time steps"""
    stash: float
    """per live micro-batch: what its backward keeps, what it received for a split layer, and what it sent"""
    kept: float
    """per live micro-batch where the stage recomputes: its input"""
    buffers: float
    """messages under way: two received ahead and two being sent, each way"""
    workspace: float
    """most that a layer needs for a moment beyond the features of all layers, while those after it hold none"""


def stage_bytes(chain: Chain, first: int, last: int) -> StageBytes:
    """Of the units `first` to `last`, included. What a stage sends stays until its error has come back."""
    span = slice(first, last + 1)
    stash = chain.stash[span]
    sent, returned = float(chain.boundary_forward[last]), float(chain.boundary_backward[last])
    received = float(chain.boundary_forward[first - 1]) if first else 0.0
    answered = float(chain.boundary_backward[first - 1]) if first else 0.0
    needed = np.cumsum(stash) - float(stash.sum()) + chain.unit_workspace[span]
    more_weights = more_stash = 0.0
    if chain.units[first].start > 0 or chain.units[last].stop < chain.units[last].of:
        parts = part_costs(chain, first, last)
        more_weights, more_stash = parts.weights, parts.stash
        if chain.units[first].start > 0:
            own = sum(unit.layer == chain.units[first].layer for unit in chain.units[span])
            needed[:own] -= chain.unit_workspace[first - 1]
    return StageBytes(
        weights=float(chain.weight_bytes[span].sum()) + more_weights,
        stash=float(stash.sum()) + float(chain.resident_input[first]) + sent + more_stash,
        kept=float(chain.input_bytes[first]),
        buffers=2 * (received + returned + sent + answered),
        workspace=max(0.0, float(needed.max())),
    )
