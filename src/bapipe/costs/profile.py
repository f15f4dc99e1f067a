"""Profile: what every layer costs, per accelerator type and micro-batch size."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bapipe.errors import BaPipeError, nearest
from bapipe.io.files import content_hash, dump_json, read_versioned, write_text
from bapipe.models.layers import ModelRef, Split

__all__ = [
    "BYTE_ROWS",
    "PROFILE_SCHEMA",
    "TIME_ROWS",
    "CostTable",
    "LayerCosts",
    "Profile",
    "ProfiledLayer",
    "read_profile",
    "write_profile",
]

PROFILE_SCHEMA = "bapipe.profile/1"
Source = Literal["measured", "analytic", "simulated", "hand-written"]
Floats = NDArray[np.float64]
Rows = tuple[tuple[float, ...], ...]
TIME_ROWS = ("forward", "backward", "weight_gradient", "parting", "part_forward", "part_backward")
BYTE_ROWS = (
    "boundary_forward", "boundary_backward", "stash", "layer_workspace", "forward_workspace", "backward_workspace",
    "weight_workspace", "part_stash", "delayed", "passing_forward", "passing_backward", "saved_before",
    "kept_input",
)  # fmt: skip
"""what a `CostTable` has a row of for each micro-batch size; some of it may be None"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledLayer:
    """What does not depend on accelerator or micro-batch size."""

    name: str
    parameters: int
    weight_bytes: float
    split: Split | None = None
    shares_weights_with: str | None = None
    """the layer that holds the same parameters (tied weights)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostTable:
    """Costs on one accelerator type: one row per micro-batch size, one column per layer."""

    source: Source
    description: str
    """the machine, or the model and constants that the figures come from"""
    microbatches: tuple[int, ...]
    """sizes, increasing"""
    forward: Rows
    """seconds"""
    backward: Rows
    """seconds, input and weight gradient together"""
    boundary_forward: Rows
    """bytes that cross a cut after the layer, skip values included"""
    boundary_backward: Rows
    stash: Rows
    """bytes that backward keeps alive per micro-batch"""
    update: tuple[float, ...]
    """seconds of the optimizer step, one per layer"""
    optimizer: str | None = None
    """which optimizer's; None: not told"""
    weight_gradient: Rows | None = None
    """seconds of the weight gradient alone; None: half of the backward"""
    parting: Rows | None = None
    """seconds that the backward takes longer where its weight gradient is put off; None: not measured, counts 0"""
    workspace: tuple[float, ...] | None = None
    """bytes that the largest layer needs for a moment, one per micro-batch size"""
    layer_workspace: Rows | None = None
    """bytes that each layer needs for a moment; None: any may need `workspace`"""
    forward_workspace: Rows | None = None
    """of these, while its forward runs, and below its backward; None: not told apart"""
    backward_workspace: Rows | None = None
    weight_workspace: Rows | None = None
    """bytes that each layer needs for a moment while weight gradients that were put off are made; None: as much as
    the whole backward"""
    library: tuple[float, ...] | None = None
    """bytes that libraries keep once the layer has run, one per layer; a stage has the most of its layers', not
    their sum; None: not measured, counts 0"""
    part_forward: Rows | None = None
    """seconds that either part of the layer takes beyond its share when two stages divide it, wherever they do; 0
    where it cannot be divided; None: not measured"""
    part_backward: Rows | None = None
    part_stash: Rows | None = None
    """bytes that either part keeps alive per micro-batch beyond its share and what it receives"""
    delayed: Rows | None = None
    """bytes that are kept per micro-batch from the input gradient to a weight gradient that comes later; None: not
    known, taken as what the whole backward keeps"""
    passing_forward: Rows | None = None
    """of boundary_forward, bytes that only pass the layer by, and below of boundary_backward; None: taken as 0"""
    passing_backward: Rows | None = None
    saved_before: Rows | None = None
    """of the stash, bytes that only the layer before keeps, of what it sends: a stage that begins with this layer
    has none of them; None: taken as 0"""
    kept_input: Rows | None = None
    """bytes of what the layer receives that its own backward keeps; None: not known, taken as all"""
    not_fitting: tuple[int, ...] = ()
    """sizes that ran out of memory when measured"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerCosts:
    """Costs at one micro-batch size on one accelerator type, one entry per layer."""

    microbatch: int
    forward: Floats
    backward: Floats
    weight_gradient: Floats
    parting: Floats
    boundary_forward: Floats
    boundary_backward: Floats
    stash: Floats
    update: Floats
    workspace: float
    layer_workspace: Floats
    forward_workspace: Floats
    backward_workspace: Floats
    weight_workspace: Floats
    phases_told: bool
    """whether these two were measured, and are not the workspace again"""
    library: Floats
    part_forward: Floats
    """0 where it was not measured, as are the two below"""
    part_backward: Floats
    part_stash: Floats
    delayed: Floats
    passing_forward: Floats
    passing_backward: Floats
    saved_before: Floats
    kept_input: Floats
    """infinite where it was not measured"""
    source: Source
    interpolated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measured or computed cost of every layer of one model."""

    schema: str = PROFILE_SCHEMA
    model: ModelRef
    dtype: str
    layers: tuple[ProfiledLayer, ...]
    accelerators: dict[str, CostTable] = field(default_factory=dict)
    """by accelerator type"""
    input_bytes: float = 0.0
    """bytes of one sample into the first layer"""

    def __post_init__(self) -> None:
        if not self.layers:
            raise BaPipeError(f"the profile of {self.model.name} has no layers; profile the model again")
        for layer in self.layers:
            _require(
                layer.weight_bytes >= 0 and layer.parameters >= 0, f"layer '{layer.name}'", "weights", "negative"
            )
        for name, table in self.accelerators.items():
            self._check_table(name, table)

    def _check_table(self, name: str, table: CostTable) -> None:
        sizes = table.microbatches
        where = f"accelerator '{name}'"
        if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
            raise BaPipeError(
                f"{where}: microbatches must be increasing sizes of at least 1, got {list(sizes)[:8]}"
            )
        for field_name in (*TIME_ROWS, *BYTE_ROWS):
            rows = getattr(table, field_name)
            if rows is None:
                continue
            _require(len(rows) == len(sizes), where, field_name, f"{len(rows)} rows for {len(sizes)} sizes")
            for size, row in zip(sizes, rows, strict=True):
                got = f"{len(row)} values for {len(self.layers)} layers at micro-batch {size}"
                _require(len(row) == len(self.layers), where, field_name, got)
                for layer, value in zip(self.layers, row, strict=True):
                    _require(value >= 0, where, field_name, f"{value:g} for layer '{layer.name[:60]}'")
        _require(len(table.update) == len(self.layers), where, "update", f"{len(table.update)} values")
        _require(min(table.update, default=0.0) >= 0, where, "update", "a negative time")
        if table.library is not None:
            _require(len(table.library) == len(self.layers), where, "library", f"{len(table.library)} values")
            _require(min(table.library, default=0.0) >= 0, where, "library", "negative bytes")

    @property
    def weight_bytes(self) -> Floats:
        """Per layer; a shared weight counts where it stands first."""
        return np.array([0.0 if layer.shares_weights_with else layer.weight_bytes for layer in self.layers])

    def table(self, accelerator: str) -> CostTable:
        """The costs on that accelerator type."""
        if accelerator not in self.accelerators:
            known = ", ".join(self.accelerators) or "none"
            raise BaPipeError(
                f"the profile of {self.model.name} has no costs for '{accelerator}'"
                f"{nearest(accelerator, self.accelerators)}; it has {known}: profile the model there"
            )
        return self.accelerators[accelerator]

    def at(self, accelerator: str, microbatch: int) -> LayerCosts:
        """Costs at one size; between measured sizes interpolated, outside them refused."""
        table = self.table(accelerator)
        sizes = np.array(table.microbatches, dtype=float)
        if not sizes[0] <= microbatch <= sizes[-1]:
            raise BaPipeError(
                f"the profile of {self.model.name} on {accelerator} covers micro-batches of {sizes[0]:g} to "
                f"{sizes[-1]:g}, asked for {microbatch}; profile that size or choose one within"
            )
        above = int(np.searchsorted(sizes, microbatch))
        below = above if sizes[above] == microbatch else above - 1
        share = 0.0 if above == below else (microbatch - sizes[below]) / (sizes[above] - sizes[below])

        def mixed(rows: Rows) -> Floats:
            return (1 - share) * np.array(rows[below]) + share * np.array(rows[above])

        def mixed_or_none(rows: Rows | None) -> Floats:
            return np.zeros(len(self.layers)) if rows is None else mixed(rows)

        backward = mixed(table.backward)
        workspace = np.interp(microbatch, sizes, table.workspace) if table.workspace else 0.0
        each = np.full(len(self.layers), float(workspace))
        each = each if table.layer_workspace is None else mixed(table.layer_workspace)
        back = each if table.backward_workspace is None else mixed(table.backward_workspace)
        return LayerCosts(
            microbatch=microbatch,
            forward=mixed(table.forward),
            backward=backward,
            weight_gradient=backward / 2 if table.weight_gradient is None else mixed(table.weight_gradient),
            parting=mixed_or_none(table.parting),
            boundary_forward=mixed(table.boundary_forward),
            boundary_backward=mixed(table.boundary_backward),
            stash=mixed(table.stash),
            update=np.array(table.update),
            workspace=float(workspace),
            layer_workspace=each,
            forward_workspace=each if table.forward_workspace is None else mixed(table.forward_workspace),
            backward_workspace=back,
            weight_workspace=back if table.weight_workspace is None else mixed(table.weight_workspace),
            phases_told=table.forward_workspace is not None and table.backward_workspace is not None,
            library=np.zeros(len(self.layers)) if table.library is None else np.array(table.library),
            part_forward=mixed_or_none(table.part_forward),
            part_backward=mixed_or_none(table.part_backward),
            part_stash=mixed_or_none(table.part_stash),
            delayed=mixed(table.stash if table.delayed is None else table.delayed),
            passing_forward=mixed_or_none(table.passing_forward),
            passing_backward=mixed_or_none(table.passing_backward),
            saved_before=mixed_or_none(table.saved_before),
            kept_input=np.full(len(self.layers), np.inf) if table.kept_input is None else mixed(table.kept_input),
            source=table.source,
            interpolated=above != below,
        )

    @property
    def hash(self) -> str:
        return content_hash(self)


def _require(condition: bool, where: str, what: str, got: str) -> None:
    if not condition:
        raise BaPipeError(f"{where}: {what} is wrong: {got}; correct the profile")


def read_profile(path: str | Path) -> Profile:
    """The one reader of profile.json."""
    return read_versioned(Profile, path, schema=PROFILE_SCHEMA)


def write_profile(profile: Profile, path: str | Path) -> None:
    """Write profile.json; the same profile gives the same bytes."""
    write_text(path, dump_json(profile))
