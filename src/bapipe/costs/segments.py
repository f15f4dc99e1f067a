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

from bapipe.costs.profile import Profile, ProfiledLayer

__all__ = ["Chain", "Unit", "holds_all_weights", "make_chain"]

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
    parting: Floats
    """seconds that the backward takes longer where its weight gradient is put off"""
    update: Floats
    weight_bytes: Floats
    stash: Floats
    delayed: Floats
    """bytes per micro-batch that wait for a weight gradient which is put off"""
    boundary_forward: Floats
    """bytes that cross a cut after the unit; 0 after the last"""
    boundary_backward: Floats
    input_bytes: Floats
    """bytes that enter the unit when a stage starts with it"""
    resident_input: Floats
    """bytes per micro-batch that a stage keeps on top when it starts inside a split layer"""
    kept_input: Floats
    """bytes of what the unit's layer receives that its own backward keeps; infinite where that is not known"""
    passing: Floats
    """of boundary_forward after the unit's layer, bytes that only pass the layer by"""
    saved_before: Floats
    """of the stash, bytes that a stage which begins with the unit does not keep: only the layer before does"""
    workspace: float
    """bytes that the largest unit needs for a moment, and libraries for good"""
    unit_workspace: Floats
    """bytes that the unit's layer needs for a moment, of its channels up to the unit's last"""
    forward_workspace: Floats
    """of these, what its forward needs, and below its backward"""
    backward_workspace: Floats
    weight_workspace: Floats
    """what it needs while weight gradients that were put off are made"""
    phases_told: bool
    """whether the two were measured: with gradients there already, to which a backward adds its own"""
    library: Floats
    """bytes that libraries keep once the unit's layer has run; all layers of a stage have the same"""
    part_forward: Floats
    """seconds beyond its share that a part of the unit's layer takes, (types, units)"""
    part_backward: Floats
    part_stash: Floats
    """bytes per micro-batch beyond its share that a part of the unit's layer keeps"""
    shared_weight_bytes: Floats
    """weights of the unit's whole layer where every part of it holds them all, else 0"""
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


def holds_all_weights(layer: ProfiledLayer) -> bool:
    """Whether every part of the layer holds all its weights, as a recurrent one divided by time steps does."""
    return layer.split is not None and layer.split.by == "time steps" and layer.shares_weights_with is None


def make_chain(
    profile: Profile, types: Sequence[str], microbatch: int, *, split: dict[int, int] | None = None
) -> Chain:
    """The chain of a profile at one micro-batch size.

    `split` maps a layer to the number of slices it is cut into (channels are dealt as evenly as they go). Cut
    inside a layer, the previous stage sends the layer's input and the outputs it has computed, and the error of
    both comes back; the next stage keeps the input too. A unit's costs are its share of the layer's; what a part
    costs beyond that is known where the profile has it.
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

    def most(field: str) -> Floats:
        """Of any accelerator type, per layer."""
        return np.asarray(np.max([getattr(cost, field) for cost in costs], axis=0), dtype=np.float64)

    forward_out = most("boundary_forward")
    backward_out = most("boundary_backward")
    forward_in = into(forward_out, profile.input_bytes * microbatch)
    backward_in = into(backward_out, 0.0)
    inside = done < 1
    passing = most("passing_forward")
    made = (forward_out - passing)[layers]
    made_back = (backward_out - most("passing_backward"))[layers]
    boundary_forward = np.where(inside, forward_in[layers] + done * made, forward_out[layers])
    boundary_backward = np.where(inside, backward_in[layers] + done * made_back, backward_out[layers])
    boundary_forward[-1] = boundary_backward[-1] = 0.0
    library = most("library")
    shared = np.array([layer.weight_bytes if holds_all_weights(layer) else 0.0 for layer in profile.layers])
    return Chain(
        profile=profile,
        microbatch=microbatch,
        types=tuple(types),
        units=tuple(units),
        forward=np.array([cost.forward[layers] * share for cost in costs]),
        backward=np.array([cost.backward[layers] * share for cost in costs]),
        weight_gradient=np.array([cost.weight_gradient[layers] * share for cost in costs]),
        parting=np.array([cost.parting[layers] * share for cost in costs]),
        update=np.array([cost.update[layers] * share for cost in costs]),
        weight_bytes=profile.weight_bytes[layers] * share,
        stash=most("stash")[layers] * share,
        delayed=most("delayed")[layers] * share,
        boundary_forward=boundary_forward,
        boundary_backward=boundary_backward,
        input_bytes=np.where(begun > 0, forward_in[layers] + begun * made, forward_in[layers]),
        resident_input=np.where(begun > 0, forward_in[layers], 0.0),
        kept_input=most("kept_input")[layers],
        passing=passing[layers],
        saved_before=np.where(begun > 0, 0.0, np.min([cost.saved_before for cost in costs], axis=0)[layers]),
        workspace=max(cost.workspace for cost in costs) + float(library.max()),
        unit_workspace=most("layer_workspace")[layers] * done,
        forward_workspace=most("forward_workspace")[layers] * done,
        backward_workspace=most("backward_workspace")[layers] * done,
        weight_workspace=most("weight_workspace")[layers] * done,
        phases_told=all(cost.phases_told for cost in costs),
        library=library[layers],
        part_forward=np.array([cost.part_forward[layers] for cost in costs]),
        part_backward=np.array([cost.part_backward[layers] for cost in costs]),
        part_stash=most("part_stash")[layers],
        shared_weight_bytes=shared[layers],
        source=", ".join(dict.fromkeys(cost.source for cost in costs)),
        interpolated=any(cost.interpolated for cost in costs),
    )
