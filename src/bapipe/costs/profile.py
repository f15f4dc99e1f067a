"""Profile: what every layer costs, per accelerator type and micro-batch size."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bapipe.costs.fields import COST_FIELDS, CostArrays, CostTable, Floats, Like, Source
from bapipe.errors import BaPipeError, nearest
from bapipe.hardware.precision import find_precision
from bapipe.io.amounts import require_amounts
from bapipe.io.files import content_hash, dump_json, read_versioned, unless_default, write_text
from bapipe.models.layers import ModelRef, Split

__all__ = [
    "PROFILE_SCHEMA",
    "CostTable",
    "LayerCosts",
    "Profile",
    "ProfiledLayer",
    "read_profile",
    "write_profile",
]

PROFILE_SCHEMA = "bapipe.profile/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledLayer:
    """What does not depend on accelerator or micro-batch size."""

    name: str
    parameters: int
    weight_bytes: float
    split: Split | None = None
    shares_weights_with: str | None = None
    """the layer that holds the same parameters (tied weights)"""
    modules: tuple[str, ...] = ()
    """paths of the model's innermost modules that run in it, in order; (): not known"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerCosts(CostArrays):
    """Costs at one micro-batch size on one accelerator type, one entry per layer."""

    microbatch: int
    phases_known: bool
    """whether forward_workspace and backward_workspace were measured, and are not the workspace again"""
    source: Source
    interpolated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Measured or computed cost of every layer of one model."""

    schema: str = PROFILE_SCHEMA
    model: ModelRef
    dtype: str
    """precision, by its word: fp32, tf32, bf16, fp16, bf16-mixed, fp16-mixed"""
    layers: tuple[ProfiledLayer, ...]
    accelerators: dict[str, CostTable] = field(default_factory=dict)
    """by accelerator type"""
    input_bytes: float = 0.0
    """bytes of one sample into the first layer"""
    compiled: bool = False
    """whether the layers were measured compiled"""
    compiled_accelerators: dict[str, CostTable] | None = unless_default(None)  # noqa: RUF009 (a field)
    """costs of the same layers compiled, by accelerator type, where `accelerators` has those of the layers as
    captured and both were measured (`bapipe.costs.profile_ways`)"""

    def __post_init__(self) -> None:
        if not self.layers:
            raise BaPipeError(f"the profile of {self.model.name} has no layers; profile the model again")
        for layer in self.layers:
            _require(
                layer.weight_bytes >= 0 and layer.parameters >= 0, f"layer '{layer.name}'", "weights", "negative"
            )
        for where, table in self.named_tables():
            self._check_table(where, table)
        compiled = self.compiled_accelerators
        if compiled is not None and (self.compiled or not compiled or not compiled.keys() <= {*self.accelerators}):
            raise BaPipeError(
                f"the profile of {self.model.name} has compiled costs of types without costs as captured; profile "
                "the model again with --compile auto"
            )

    def named_tables(self) -> list[tuple[str, CostTable]]:
        """Every table of costs, and what messages call it."""
        own = [(f"accelerator '{name[:60]}'", table) for name, table in self.accelerators.items()]
        others = (self.compiled_accelerators or {}).items()
        return own + [(f"accelerator '{name[:60]}' compiled", table) for name, table in others]

    def _check_table(self, where: str, table: CostTable) -> None:
        sizes = table.microbatches
        if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
            raise BaPipeError(
                f"{where}: microbatches must be increasing sizes of at least 1, got {list(sizes)[:8]}"
            )
        if table.spread is not None:
            known = 0 <= table.spread < 1
            _require(known, where, "spread", f"{table.spread:g}, which is no share of at least 0 and below 1")
        places = {
            "layers": [f"layer '{layer.name[:60]}'" for layer in self.layers],
            "sizes": [f"micro-batch {size}" for size in sizes],
        }
        for field_name, rule in COST_FIELDS.items():
            given = getattr(table, field_name)
            if given is None:
                continue
            rows, of = [("", given)], "sizes" if rule.per == "size" else "layers"
            if rule.per == "size and layer":
                _require(len(given) == len(sizes), where, field_name, f"{len(given)} rows for {len(sizes)} sizes")
                rows = [(f" at {size}", row) for size, row in zip(places["sizes"], given, strict=True)]
            for at, row in rows:
                got = f"{len(row)} values for {len(places[of])} {of}{at}"
                _require(len(row) == len(places[of]), where, field_name, got)
                wrong = next((index for index, value in enumerate(row) if not value >= 0), None)
                if wrong is not None:
                    _require(False, where, field_name, f"{row[wrong]:g} for {places[of][wrong]}")

    @property
    def weight_bytes(self) -> Floats:
        """Per layer; a shared weight counts where it stands first."""
        return np.array([0.0 if layer.shares_weights_with else layer.weight_bytes for layer in self.layers])

    @property
    def gradient_bytes(self) -> Floats:
        """Per layer, what of `weight_bytes` is trained on any accelerator type."""
        known = [table.trainable_bytes for table in self.accelerators.values()]
        rows = [row for row in known if row is not None]
        return np.max(rows, axis=0) if len(rows) == len(known) > 0 else self.weight_bytes

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
        share = 0.0 if above == below else float((microbatch - sizes[below]) / (sizes[above] - sizes[below]))
        found: dict[str, Any] = {}
        for name, rule in COST_FIELDS.items():
            given, instead = getattr(table, name), rule.unknown
            value: Any = given
            if given is None:
                value = found[instead.field] * instead.share if isinstance(instead, Like) else instead
            elif rule.per != "layer":
                value = given[below]
                if above != below:
                    value = np.array(value) * (1 - share) + np.array(given[above]) * share
            if rule.per == "size":
                found[name] = float(value)
            else:
                found[name] = np.full(len(self.layers), value) if isinstance(value, float) else np.asarray(value)
        return LayerCosts(
            **found,
            microbatch=microbatch,
            phases_known=table.forward_workspace is not None and table.backward_workspace is not None,
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
    """The one reader of profile.json; one whose parts contradict each other is refused."""
    return read_versioned(Profile, path, schema=PROFILE_SCHEMA, check=_require_consistent)


def _require_consistent(profile: Profile) -> None:
    """The precision is known, amounts beside the layers' are not negative, and tied weights are a layer's."""
    todo = "correct the profile"
    find_precision(profile.dtype)
    require_amounts(profile, where="the profile", todo=todo)
    names = {layer.name for layer in profile.layers}
    for layer in profile.layers:
        other = layer.shares_weights_with
        if other is not None and other not in names:
            raise BaPipeError(
                f"layer '{layer.name[:60]}' shares weights with '{other[:60]}', which is no layer"
                f"{nearest(other, names)}; {todo}"
            )
    for where, table in profile.named_tables():
        require_amounts(table, where=where, todo=todo)
        for layer, own, trained in zip(
            profile.layers, profile.weight_bytes.tolist(), table.trainable_bytes or (), strict=False
        ):
            _require(
                trained <= own,
                where,
                "trainable_bytes",
                f"{trained:g} of {own:g} bytes of layer '{layer.name[:60]}'",
            )


def write_profile(profile: Profile, path: str | Path) -> None:
    """Write profile.json; the same profile gives the same bytes."""
    write_text(path, dump_json(profile))
