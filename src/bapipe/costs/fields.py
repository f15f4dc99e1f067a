"""The cost fields of a profile, each with the rules by which files, interpolation, merging and chains treat it.

A new field is one row of `CostTable`, which says all rules, and its name in `CostArrays`. Checks, interpolation
(`Profile.at`), merging (`merge_profiles`), scaling (`scaled_profile`), recalibration and chains (`make_chain`)
go through `COST_FIELDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from math import inf
from typing import Any, Literal, ParamSpec

import numpy as np
from numpy.typing import NDArray

__all__ = ["COST_FIELDS", "CostArrays", "CostField", "CostTable", "Like", "as_tuples"]

Floats = NDArray[np.float64]
Rows = tuple[tuple[float, ...], ...]
Source = Literal["measured", "analytic", "simulated", "hand-written"]
_Parameters = ParamSpec("_Parameters")


@dataclass(frozen=True, slots=True)
class Like:
    """As another field, which stands before it in the table, or a share of that."""

    field: str
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class CostField:
    """How a cost field is treated, wherever a profile or a chain goes through its fields."""

    unit: Literal["seconds", "bytes"]
    """scaled to a micro-batch of B from one of B0, seconds grow by (B + 1)/(B0 + 1) and bytes by B/B0"""
    types: Literal["each", "most", "least"]
    """a chain has it of each accelerator type, or for all of them the most or the least of any"""
    part: Literal["share", "whole", "up to", "first", "cut"]
    """what a unit of a chain takes of its layer's: its share of the channels; all of it; the share of the channels
    up to the unit's last; all of it where the unit begins the layer, else 0; what crosses a cut after the unit"""
    unknown: float | Like | None = None
    """what counts where a table does not know it (null in the file); None: every table must know it"""
    merging: Literal["both", "stand-in", "nearest", "later"] = "both"
    """of two tables of one type with other sizes: known if both know it; where one does not, taken from the field
    that `unknown` names, if both know that; in proportion to the nearest known size; the later's, if known"""
    per: Literal["size and layer", "layer", "size"] = "size and layer"
    """one row per micro-batch size with one value per layer, or one value per layer or per size; between two sizes
    values are interpolated linearly, and values per layer alone are neither interpolated nor scaled"""
    ratio: Literal["forward", "backward", "weight_gradient", "update"] | None = None
    """which ratio of a run's measured to its predicted seconds corrects it; None: bytes, which stay"""


def _carried(make: Callable[_Parameters, CostField]) -> Callable[_Parameters, dict[str, CostField]]:
    """As the metadata of a dataclass's field."""
    return lambda *args, **kwargs: {"cost": make(*args, **kwargs)}


_cost = _carried(CostField)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Costs on one accelerator type: one row per micro-batch size, one column per layer."""

    source: Source
    description: str
    """the machine, or the model and constants that the figures come from"""
    microbatches: tuple[int, ...]
    """sizes, increasing"""
    forward: Rows = field(metadata=_cost("seconds", "each", "share", ratio="forward"))
    """seconds of the forward"""
    backward: Rows = field(metadata=_cost("seconds", "each", "share", ratio="backward"))
    """seconds of the backward, input and weight gradient together"""
    boundary_forward: Rows = field(metadata=_cost("bytes", "most", "cut"))
    """bytes of activations that cross a cut after the layer, skip connections included"""
    boundary_backward: Rows = field(metadata=_cost("bytes", "most", "cut"))
    """bytes of their gradients"""
    saved_activations: Rows = field(metadata=_cost("bytes", "most", "share"))
    """bytes of saved activations, which the backward keeps alive per micro-batch"""
    update: tuple[float, ...] = field(
        metadata=_cost("seconds", "each", "share", None, "later", per="layer", ratio="update")
    )
    """seconds of the optimizer step"""
    optimizer: str | None = None
    """which optimizer's; None: not known"""
    optimizer_state: float | None = None
    """bytes that it keeps per parameter, as measured; None: not measured"""
    optimizer_workspace: float | None = None
    """bytes of temporary tensors of its step per parameter, as measured; None: not measured"""
    weight_gradient: Rows | None = field(
        default=None, metadata=_cost("seconds", "each", "share", Like("backward", 1 / 2), ratio="backward")
    )
    """seconds of the weight gradient alone, as a split backward has it"""
    parting: Rows | None = field(
        default=None, metadata=_cost("seconds", "each", "share", 0.0, "nearest", ratio="weight_gradient")
    )
    """seconds that a split backward takes longer than the whole, because its weight gradient is deferred"""
    workspace: tuple[float, ...] | None = field(
        default=None, metadata=_cost("bytes", "most", "whole", 0.0, per="size")
    )
    """bytes of workspace: temporary memory while a layer runs, of the layer that needs most"""
    layer_workspace: Rows | None = field(default=None, metadata=_cost("bytes", "most", "up to", Like("workspace")))
    """bytes of workspace of each layer"""
    forward_workspace: Rows | None = field(
        default=None, metadata=_cost("bytes", "most", "up to", Like("layer_workspace"), "stand-in")
    )
    """of these, while its forward runs"""
    backward_workspace: Rows | None = field(
        default=None, metadata=_cost("bytes", "most", "up to", Like("layer_workspace"), "stand-in")
    )
    """of these, while its backward runs"""
    weight_workspace: Rows | None = field(
        default=None, metadata=_cost("bytes", "most", "up to", Like("backward_workspace"), "stand-in")
    )
    """bytes of workspace while its deferred weight gradient is computed"""
    library: tuple[float, ...] | None = field(
        default=None, metadata=_cost("bytes", "most", "whole", 0.0, "later", per="layer")
    )
    """bytes that libraries keep once the layer has run; a stage has the most of its layers', not their sum"""
    weight_casts: tuple[float, ...] | None = field(
        default=None, metadata=_cost("bytes", "most", "share", 0.0, "later", per="layer")
    )
    """bytes of the copies of its weights that autocast makes and keeps while a global batch runs"""
    part_forward: Rows | None = field(
        default=None, metadata=_cost("seconds", "each", "whole", 0.0, "nearest", ratio="forward")
    )
    """seconds that the forward of either part of the layer takes beyond its share when two stages divide it,
    wherever they do; 0 where it cannot be divided"""
    part_backward: Rows | None = field(
        default=None, metadata=_cost("seconds", "each", "whole", 0.0, "nearest", ratio="backward")
    )
    """seconds of the backward likewise"""
    part_saved_activations: Rows | None = field(
        default=None, metadata=_cost("bytes", "most", "whole", 0.0, "nearest")
    )
    """bytes of saved activations of either part beyond its share and what it receives"""
    delayed: Rows | None = field(
        default=None, metadata=_cost("bytes", "most", "share", Like("saved_activations"), "stand-in")
    )
    """bytes kept per micro-batch from the input gradient to a deferred weight gradient"""
    passing_forward: Rows | None = field(default=None, metadata=_cost("bytes", "most", "whole", 0.0, "nearest"))
    """of boundary_forward, bytes that only pass the layer by"""
    passing_backward: Rows | None = field(default=None, metadata=_cost("bytes", "most", "whole", 0.0, "nearest"))
    """of boundary_backward, bytes that only pass the layer by"""
    saved_before: Rows | None = field(default=None, metadata=_cost("bytes", "least", "first", 0.0, "nearest"))
    """of the saved activations, bytes that only the layer before saves, of what it sends: a stage that begins with
    this layer has none of them"""
    kept_input: Rows | None = field(default=None, metadata=_cost("bytes", "most", "whole", inf, "nearest"))
    """bytes of what the layer receives that its own backward keeps"""
    trainable_bytes: tuple[float, ...] | None = field(
        default=None, metadata=_cost("bytes", "most", "share", inf, "later", per="layer")
    )
    """of its weights, bytes of the parameters that have a gradient; None: of all"""
    not_fitting: tuple[int, ...] = ()
    """sizes that ran out of memory when measured"""
    step_overhead: float | None = None
    """seconds of a step beside its actions, as short runs showed: ranks that wait for each other, the sum of the
    loss; None: not known"""
    spread: float | None = None
    """relative standard error of one layer's time, as measured; None: not known"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostArrays:
    """The cost fields of `CostTable` at one micro-batch size, unknown ones filled in; `workspace` is a number."""

    forward: Floats
    backward: Floats
    boundary_forward: Floats
    boundary_backward: Floats
    saved_activations: Floats
    update: Floats
    weight_gradient: Floats
    parting: Floats
    workspace: float
    layer_workspace: Floats
    forward_workspace: Floats
    backward_workspace: Floats
    weight_workspace: Floats
    library: Floats
    weight_casts: Floats
    part_forward: Floats
    part_backward: Floats
    part_saved_activations: Floats
    delayed: Floats
    passing_forward: Floats
    passing_backward: Floats
    saved_before: Floats
    kept_input: Floats
    trainable_bytes: Floats


def as_tuples(values: Floats) -> tuple[Any, ...]:
    """An array of one or two dimensions as a table has it."""
    return tuple(map(tuple, values.tolist()) if values.ndim == 2 else values.tolist())


COST_FIELDS: dict[str, CostField] = {
    item.name: item.metadata["cost"] for item in fields(CostTable) if item.metadata
}
"""name -> rules, in the order of the table"""
