"""Small models on this CPU, for a run that goes the whole way before a GPU is rented. Its times mean nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from machine import Machine

from bapipe.costs.fields import COST_FIELDS, CostTable, as_tuples
from bapipe.costs.profile import write_profile
from bapipe.torch.profiler import MeasureSettings, profile_model
from bapipe.torch.slices.mps import even_slices

__all__ = ["DEEP", "DEEP_MEMORY", "MODELS", "SIZES", "write_profiles"]

MODELS: dict[str, dict[str, Any]] = {
    "vgg16": {"image": 32, "width": 8, "hidden": 64, "classes": 10, "with_loss": True},
    "resnet50": {"image": 32, "width": 8, "classes": 10, "with_loss": True},
    "gnmt-8": {"hidden": 32, "vocabulary": 65536, "sequence": 12, "with_loss": True},
}
SIZES = {"vgg16": (4, 32), "resnet50": (4, 32), "gnmt-8": (4, 32)}
"""model -> micro-batch, mini-batch"""
DEEP: dict[str, Any] = {"hidden": 256, "vocabulary": 256, "sequence": 4, "with_loss": True}
"""a GNMT-8 whose layers fill the memory of a process before they take long"""
DEEP_MEMORY = 250e6


def write_profiles(
    folder: Path,
    machine: Machine,
    models: Collection[str],
    sizes: tuple[int, ...],
    *,
    args: Mapping[str, Any] | None = None,
) -> None:
    """Measure those small models of which there is no MODEL-fp32.json yet, with their layers in parts.

    Every share of the machine has what was measured, as much faster as it is larger than an equal share. `args`
    replaces what MODELS builds them with.
    """
    folder.mkdir(parents=True, exist_ok=True)
    equal = even_slices(len(machine))[0]
    for name in (model for model in models if not (folder / f"{model}-fp32.json").exists()):
        with tempfile.TemporaryDirectory() as cache:
            settings = MeasureSettings(
                microbatches=sizes, folder=Path(cache), iterations=2, parts=True, whole=False
            )
            profile = profile_model(
                name,
                settings=settings,
                device=machine.device,
                args=args or MODELS[name],
                accelerator=machine.type_name(equal),
                threads=1,
            ).profile
        (table,) = profile.accelerators.values()
        tables = {machine.type_name(share): _scaled(table, equal / share) for share in (equal, *machine.shares)}
        write_profile(replace(profile, accelerators=tables), folder / f"{name}-fp32.json")


def _scaled(table: CostTable, factor: float) -> CostTable:
    """The table with all its times so many times as long."""
    changed: dict[str, Any] = {
        name: as_tuples(np.array(getattr(table, name)) * factor)
        for name, rule in COST_FIELDS.items()
        if rule.unit == "seconds" and getattr(table, name) is not None
    }
    return replace(table, **changed)
