"""Chain: the units that a partition cuts between, with their costs at one micro-batch size.

A unit is a layer, or a slice of the channels of one that may be split. Partition algorithms see only the chain,
so that the same code serves inter-layer and intra-layer cuts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bapipe.profile import Profile

__all__ = ["Chain", "Unit", "make_chain"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Unit:
    """Channels [start, stop) of `of` of a layer; a whole layer is [0, 1) of 1."""

    layer: int
    start: int = 0
    stop: int = 1
    of: int = 1

    @property
    def share(self) -> float:
        return (self.stop - self.start) / self.of

    @property
    def whole(self) -> bool:
        return self.start == 0 and self.stop == self.of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Chain:
    """Costs of consecutive units for one micro-batch; time arrays are (types, units), byte arrays (units,)."""

    profile: Profile
    microbatch: int
    types: tuple[str, ...]
    """accelerator types, in the order of the rows"""
    units: tuple[Unit, ...]
    forward: Floats
    backward: Floats
    weight_gradient: Floats
    update: Floats
    weight_bytes: Floats
    stash: Floats
    boundary_forward: Floats
    """bytes that cross a cut after the unit; 0 after the last"""
    boundary_backward: Floats
    input_bytes: Floats
    """bytes that enter the unit when a stage starts with it"""
    resident_input: Floats
    """bytes per micro-batch that a stage keeps on top when it starts inside a split layer"""
    workspace: float
    """bytes that the largest unit needs for a moment"""
    unit_workspace: Floats
    """bytes that each unit needs for a moment"""
    source: str
    interpolated: bool

    def __len__(self) -> int:
        return len(self.units)

    def row(self, accelerator_type: str) -> int:
        return self.types.index(accelerator_type)

    @property
    def work(self) -> Floats:
        """Forward plus backward, (types, units)."""
        return self.forward + self.backward


def make_chain(
    profile: Profile, types: Sequence[str], microbatch: int, *, split: dict[int, int] | None = None
) -> Chain:
    """The chain of a profile at one micro-batch size.

    `split` maps a layer to the number of slices it is cut into (channels are dealt as evenly as they go). Cut
    inside a layer, the previous stage sends the layer's input and the outputs it has computed, and the error of
    both comes back; the next stage keeps the input too.
    """
    costs = [profile.at(name, microbatch) for name in types]
    units: list[Unit] = []
    for index, layer in enumerate(profile.layers):
        slices = (split or {}).get(index, 1)
        channels = layer.split.channels if layer.split is not None and slices > 1 else 1
        edges = np.unique(np.linspace(0, channels, min(slices, channels) + 1).round().astype(int))
        units.extend(Unit(index, int(a), int(b), channels) for a, b in itertools.pairwise(edges))
    layers = np.array([unit.layer for unit in units])
    share = np.array([unit.share for unit in units])
    done = np.array([unit.stop / unit.of for unit in units])
    begun = np.array([unit.start / unit.of for unit in units])

    def into(boundary: Floats, first: float) -> Floats:
        return np.concatenate([[first], boundary[:-1]])

    forward_out = np.max([cost.boundary_forward for cost in costs], axis=0)
    backward_out = np.max([cost.boundary_backward for cost in costs], axis=0)
    forward_in = into(forward_out, profile.input_bytes * microbatch)
    backward_in = into(backward_out, 0.0)
    inside = done < 1
    boundary_forward = np.where(inside, forward_in[layers] + done * forward_out[layers], forward_out[layers])
    boundary_backward = np.where(inside, backward_in[layers] + done * backward_out[layers], backward_out[layers])
    boundary_forward[-1] = boundary_backward[-1] = 0.0
    return Chain(
        profile=profile,
        microbatch=microbatch,
        types=tuple(types),
        units=tuple(units),
        forward=np.array([cost.forward[layers] * share for cost in costs]),
        backward=np.array([cost.backward[layers] * share for cost in costs]),
        weight_gradient=np.array([cost.weight_gradient[layers] * share for cost in costs]),
        update=np.array([cost.update[layers] * share for cost in costs]),
        weight_bytes=profile.weight_bytes[layers] * share,
        stash=np.max([cost.stash for cost in costs], axis=0)[layers] * share,
        boundary_forward=boundary_forward,
        boundary_backward=boundary_backward,
        input_bytes=np.where(begun > 0, forward_in[layers] + begun * forward_out[layers], forward_in[layers]),
        resident_input=np.where(begun > 0, forward_in[layers], 0.0),
        workspace=max(cost.workspace for cost in costs),
        unit_workspace=np.max([cost.layer_workspace for cost in costs], axis=0)[layers] * share,
        source=", ".join(dict.fromkeys(cost.source for cost in costs)),
        interpolated=any(cost.interpolated for cost in costs),
    )
