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
    known = [layer.name for layer in profile.layers]
    order = [known.index(name) for name in _names(half, last=3)]
    wanted = _names(half, last=half)
    made = tuple(replace(profile.layers[index], name=name) for index, name in zip(order, wanted, strict=True))
    model = replace(
        profile.model,
        name=f"gnmt-{layers}",
        args={**profile.model.args, "layers": layers},
        fingerprint=None,
    )
    tables = {name: _reordered(table, order) for name, table in profile.accelerators.items()}
    return replace(profile, model=model, layers=made, accelerators=tables)


def _names(half: int, *, last: int) -> list[str]:
    """Layers in order, those after the `last` of encoder and decoder called like it."""
    encoder = [f"encoder.{min(index, last)}" for index in range(half)]
    decoder = [f"decoder.{min(index, last)}" for index in range(1, half)]
    return ["source_embedding", *encoder, "target_embedding", "decoder.0", "attention", *decoder, "classifier"]


def _reordered(table: CostTable, order: list[int]) -> CostTable:
    changed: dict[str, Any] = {"update": tuple(table.update[index] for index in order)}
    for name in _ROWS:
        rows = getattr(table, name)
        if rows is not None:
            changed[name] = tuple(tuple(row[index] for index in order) for row in rows)
    return replace(table, **changed)
