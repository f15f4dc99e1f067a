"""A plan as the files that another engine reads."""

from __future__ import annotations

from collections.abc import Callable

from bapipe.errors import BaPipeError
from bapipe.exporters.block_writers import write_colossalai, write_flagscale, write_megatron
from bapipe.exporters.deepspeed_writer import write_deepspeed
from bapipe.exporters.export_text import Export, Job
from bapipe.exporters.module_writers import write_automodel, write_device_map, write_torchtitan
from bapipe.exporters.targets import find_target, find_version
from bapipe.exporters.torch_script import write_torch
from bapipe.records.plan import Plan

__all__ = ["WRITERS", "default_path", "export_plan"]

WRITERS: dict[str, Callable[[Job], Export]] = {
    "torch": write_torch,
    "torchtitan": write_torchtitan,
    "automodel": write_automodel,
    "megatron": write_megatron,
    "deepspeed": write_deepspeed,
    "colossalai": write_colossalai,
    "flagscale": write_flagscale,
    "device-map": write_device_map,
}


def export_plan(
    plan: Plan, to: str, *, out: str | None = None, version: str | None = None, strict: bool = False
) -> Export:
    """The files for that engine, with what of the plan it cannot hold.

    `out` is the path of the main file; others lie beside it. Nothing is written. Raises BaPipeError where the
    engine cannot run the plan at all, or, with `strict`, where it would lose anything.
    """
    target = find_target(to)
    job = Job(
        plan=plan, target=target, version=find_version(target, version), out=out or default_path(to, version)
    )
    made = WRITERS[to](job)
    if strict and made.losses:
        lost = "; ".join(f"{feature.value} ({text})" for feature, text in made.losses.items())
        raise BaPipeError(f"{target.title} would lose {lost}; plan again, or leave --strict out")
    return made


def default_path(to: str, version: str | None = None) -> str:
    """The file name where none is given."""
    target = find_target(to)
    toml = to == "torchtitan" and find_version(target, version) == "0.2"
    return f"{to.replace('-', '_')}_plan{'.toml' if toml else target.ending}"
