"""Each layer's cost where the plan runs it, where the cuts fell, and what crosses them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bapipe.costs.profile import LayerCosts, Profile
from bapipe.errors import BaPipeError
from bapipe.records.plan import Plan, PlanStage

__all__ = ["Cut", "LayerView", "ShownLayer", "cuts_of", "layer_view", "require_profile_of", "shares_of"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownLayer:
    """One layer at the plan's micro-batch size, on the accelerators of its stage."""

    index: int
    name: str
    stages: tuple[int, ...]
    """more than one where the layer is split"""
    forward: float
    """seconds per micro-batch"""
    backward: float
    weight_bytes: float
    saved: float
    """bytes that backward keeps alive per micro-batch"""
    boundary_forward: float
    """bytes per micro-batch that would cross a cut after it"""
    boundary_backward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Where one stage ends and the next begins."""

    stage: int
    """the one that ends"""
    position: float
    """in layers: 4.0 is between layers 3 and 4, 3.5 halfway through the channels of layer 3"""
    forward_bytes: float
    """per micro-batch to the next stage"""
    backward_bytes: float
    """per micro-batch from the next stage"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerView:
    """The model as the plan cuts it."""

    layers: tuple[ShownLayer, ...]
    cuts: tuple[Cut, ...]


def require_profile_of(plan: Plan, profile: Profile) -> None:
    """Refuse a profile that the plan was not made from: its figures would not be the plan's."""
    if profile.hash != plan.profile_hash:
        raise BaPipeError(
            f"the plan was made from profile {plan.profile_hash}, this profile is {profile.hash}; "
            "give the profile that was planned with, or plan again"
        )


def shares_of(stage: PlanStage) -> dict[int, float]:
    """Which part of each layer the stage has: 1 but for layers that are split."""
    shares = dict.fromkeys(range(stage.first_layer, stage.last_layer + 1), 1.0)
    for part in stage.fractions:
        shares[part.layer] = (part.stop - part.start) / part.of
    return shares


def cuts_of(plan: Plan) -> tuple[Cut, ...]:
    """The plan's cuts, first to last; one fewer than its stages."""
    cuts = []
    for index, (stage, after) in enumerate(zip(plan.stages[:-1], plan.stages[1:], strict=True)):
        done = {part.layer: part.stop / part.of for part in stage.fractions}
        cuts.append(
            Cut(
                stage=index,
                position=stage.last_layer + done.get(stage.last_layer, 1.0),
                forward_bytes=stage.send_forward_bytes,
                backward_bytes=after.send_backward_bytes,
            )
        )
    return tuple(cuts)


def layer_view(plan: Plan, profile: Profile) -> LayerView:
    """Every layer's cost at the plan's micro-batch size; the layers of a stage sum up to the stage.

    The profile must be the one that was planned with (`require_profile_of`). A layer's times are those on the
    slowest type among its stage's accelerators, as the simulator takes them; a split layer's are the sum of its
    parts. The backward of a layer that recomputes has its forward in it, as the stage's has.
    """
    type_of = {accelerator.name: accelerator.type for accelerator in plan.cluster.accelerators}
    costs = {name: profile.at(name, plan.microbatch_size) for name in dict.fromkeys(type_of.values())}
    count = len(profile.layers)
    forward, backward = np.zeros(count), np.zeros(count)
    owners: list[list[int]] = [[] for _ in range(count)]
    for number, stage in enumerate(plan.stages):
        types = dict.fromkeys(type_of[name] for name in stage.accelerators)
        share = np.zeros(count)
        for layer, part in shares_of(stage).items():
            share[layer] = part
            owners[layer].append(number)
        again = np.zeros(count)
        for run in stage.recompute_layers:
            again[run.first : run.last + 1] = 1.0
        forward += _slowest([costs[name].forward * share for name in types])
        backward += _slowest([(costs[name].backward + again * costs[name].forward) * share for name in types])
    weights = profile.weight_bytes
    saved, ahead, back = (
        _largest(costs, field) for field in ("saved_activations", "boundary_forward", "boundary_backward")
    )
    layers = tuple(
        ShownLayer(
            index=index,
            name=layer.name,
            stages=tuple(owners[index]),
            forward=float(forward[index]),
            backward=float(backward[index]),
            weight_bytes=float(weights[index]),
            saved=float(saved[index]),
            boundary_forward=float(ahead[index]) if index + 1 < count else 0.0,
            boundary_backward=float(back[index]) if index + 1 < count else 0.0,
        )
        for index, layer in enumerate(profile.layers)
    )
    return LayerView(layers=layers, cuts=cuts_of(plan))


def _slowest(rows: list[Floats]) -> Floats:
    return max(rows, key=lambda row: float(row.sum()))


def _largest(costs: dict[str, LayerCosts], field: str) -> Floats:
    """Over the types of the cluster, as the planner weighs bytes."""
    largest: Floats = np.max([getattr(cost, field) for cost in costs.values()], axis=0)
    return largest
