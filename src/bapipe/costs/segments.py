"""Chain: the units that a partition cuts between, with their costs at one micro-batch size.

A unit is a layer, or a slice of the channels of one that may be split. Partition algorithms see only the chain,
so that the same code serves inter-layer and intra-layer cuts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bapipe.costs.fields import COST_FIELDS, CostArrays
from bapipe.costs.profile import Profile, ProfiledLayer

__all__ = ["Chain", "Run", "Unit", "holds_all_weights", "make_chain"]

Floats = NDArray[np.float64]
Run = tuple[int, int]
"""consecutive units, first and last, included"""


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
class Chain(CostArrays):
    """Costs of consecutive units for one micro-batch; time arrays are (types, units), byte arrays (units,).

    The cost fields are those of `bapipe.costs.fields.CostTable`, of a unit by the rules there: what crosses a cut
    after the last unit is 0, and `workspace` has on top what libraries keep.
    """

    profile: Profile
    microbatch: int
    types: tuple[str, ...]
    """accelerator types, in the order of the rows"""
    units: tuple[Unit, ...]
    weight_bytes: Floats
    input_bytes: Floats
    """bytes that enter the unit when a stage starts with it"""
    resident_input: Floats
    """bytes per micro-batch that a stage keeps on top when it starts inside a split layer"""
    phases_known: bool
    """whether the workspaces of forward and backward were measured: with gradients there already, to which a
    backward adds its own"""
    shared_weight_bytes: Floats
    """weights of the unit's whole layer where every part of it holds them all, else 0"""
    tied_bytes: Floats
    """weights of the unit that it shares with an earlier layer, which `weight_bytes` counts there, else 0"""
    tied_to: NDArray[np.int64]
    """that layer, -1 where there is none"""
    answered: NDArray[np.bool_]
    """whether a gradient comes back over a cut after the unit: not where nothing before it is trained"""
    sends_gradient: NDArray[np.bool_]
    """whether a stage that begins with the unit sends an input gradient back; a first stage does not"""
    source: str
    interpolated: bool
    recompute: tuple[Run, ...] = ()
    """runs of units that recompute, which the figures have in them (`bapipe.costs.recomputed_layers`)"""

    @property
    def passing(self) -> Floats:
        """Of boundary_forward after the unit's layer, bytes that only pass the layer by."""
        return self.passing_forward

    @property
    def unit_workspace(self) -> Floats:
        """Bytes of workspace of the unit's layer, of its channels up to the unit's last."""
        return self.layer_workspace

    def __len__(self) -> int:
        return len(self.units)

    def row(self, accelerator_type: str) -> int:
        return self.types.index(accelerator_type)

    @property
    def work(self) -> Floats:
        """Forward plus backward, (types, units)."""
        return self.forward + self.backward

    def return_seconds(self, bandwidth: float, latency: float) -> Floats:
        """Seconds that the gradient for a cut after each unit is on such a link; 0 where none comes back."""
        return np.where(self.answered, self.boundary_backward / bandwidth + latency, 0.0)


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
    done = np.array([unit.stop / unit.of for unit in units])
    begun = np.array([unit.start / unit.of for unit in units])
    share = np.array([unit.share for unit in units])
    taken = {"share": share, "whole": 1.0, "up to": done, "first": begun == 0, "cut": 1.0}
    """by `CostField.part`"""
    found: dict[str, Any] = {}
    for name, rule in COST_FIELDS.items():
        values = np.array([getattr(cost, name) for cost in costs])
        if rule.types != "each":
            values = values.min(axis=0) if rule.types == "least" else values.max(axis=0)
        found[name] = float(values) if rule.per == "size" else values[..., layers] * taken[rule.part]
    before = np.searchsorted(layers, layers) - 1
    """the last unit of the layer before, -1 in the first layer"""

    def into(boundary: Floats, first: float) -> Floats:
        return np.where(before < 0, first, boundary[before])

    out, back = found["boundary_forward"], found["boundary_backward"]
    forward_in, backward_in = into(out, profile.input_bytes * microbatch), into(back, 0.0)
    made, made_back = out - found["passing_forward"], back - found["passing_backward"]
    found["boundary_forward"] = np.where(done < 1, forward_in + done * made, out)
    found["boundary_backward"] = np.where(done < 1, backward_in + done * made_back, back)
    found["boundary_forward"][-1] = found["boundary_backward"][-1] = 0.0
    found["workspace"] += float(found["library"].max())
    shared = np.array([layer.weight_bytes if holds_all_weights(layer) else 0.0 for layer in profile.layers])
    weights = profile.weight_bytes[layers] * share
    found["trainable_bytes"] = np.where(np.isfinite(found["trainable_bytes"]), found["trainable_bytes"], weights)
    places = {layer.name: index for index, layer in enumerate(profile.layers)}
    tied = np.array([places.get(layer.shares_weights_with or "", -1) for layer in profile.layers])
    each = np.array([layer.weight_bytes for layer in profile.layers])
    known = all(profile.table(name).trainable_bytes is not None for name in types)
    answered = (found["boundary_backward"] > 0) | (not known)
    return Chain(
        **found,
        profile=profile,
        microbatch=microbatch,
        types=tuple(types),
        units=tuple(units),
        weight_bytes=weights,
        input_bytes=forward_in + begun * made,
        resident_input=np.where(begun > 0, forward_in, 0.0),
        phases_known=all(cost.phases_known for cost in costs),
        shared_weight_bytes=shared[layers],
        tied_bytes=np.where(tied >= 0, each, 0.0)[layers] * share,
        tied_to=tied[layers],
        answered=answered,
        sends_gradient=np.concatenate([[False], answered[:-1]]),
        source=", ".join(dict.fromkeys(cost.source for cost in costs)),
        interpolated=any(cost.interpolated for cost in costs),
    )
