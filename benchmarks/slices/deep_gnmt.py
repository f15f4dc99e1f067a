"""GNMT-L for any L from a profile of GNMT-8: further layers cost what the last of their kind do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bapipe.profile import CostTable, Profile

__all__ = ["deep_profile"]

_ROWS = (
    "forward",
    "backward",
    "weight_gradient",
    "boundary_forward",
    "boundary_backward",
    "stash",
    "layer_workspace",
    "part_forward",
    "part_backward",
    "part_stash",
)


def deep_profile(profile: Profile, layers: int) -> Profile:
    """The profile of GNMT with `layers` LSTM layers, even and at least 8."""
    half = layers // 2
    names = [layer.name for layer in profile.layers]
    order = [names.index(name) for name in _like(half)]
    wanted = _names(half)
    made = tuple(replace(profile.layers[index], name=name) for index, name in zip(order, wanted, strict=True))
    model = replace(
        profile.model,
        name=f"gnmt-{layers}",
        args={**profile.model.args, "layers": layers},
        fingerprint=None if profile.model.fingerprint is None else "",
    )
    tables = {name: _reordered(table, order) for name, table in profile.accelerators.items()}
    return replace(profile, model=model, layers=made, accelerators=tables)


def _names(half: int) -> list[str]:
    encoder = [f"encoder.{index}" for index in range(half)]
    decoder = [f"decoder.{index}" for index in range(1, half)]
    return ["source_embedding", *encoder, "target_embedding", "decoder.0", "attention", *decoder, "classifier"]


def _like(half: int) -> list[str]:
    """The layer of GNMT-8 that each is like."""
    encoder = [f"encoder.{min(index, 3)}" for index in range(half)]
    decoder = [f"decoder.{min(index, 3)}" for index in range(1, half)]
    return ["source_embedding", *encoder, "target_embedding", "decoder.0", "attention", *decoder, "classifier"]


def _reordered(table: CostTable, order: list[int]) -> CostTable:
    changed: dict[str, Any] = {"update": tuple(table.update[index] for index in order)}
    for name in _ROWS:
        rows = getattr(table, name)
        if rows is not None:
            changed[name] = tuple(tuple(row[index] for index in order) for row in rows)
    return replace(table, **changed)
