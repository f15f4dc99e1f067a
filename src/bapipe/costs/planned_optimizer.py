"""The optimizer that a plan is for, and its memory: as a profile measured it, or by the table of common ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bapipe.costs.optimizers import DEFAULT_OPTIMIZER, OptimizerMemory, find_optimizer, parse_optimizer
from bapipe.costs.profile import Profile
from bapipe.errors import BaPipeError
from bapipe.hardware.precision import MASTER_BYTES, find_precision

__all__ = ["PlannedOptimizer", "planned_optimizer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedOptimizer:
    """An optimizer by its name in plans, and what it needs beside weights and gradients."""

    name: str = DEFAULT_OPTIMIZER
    memory: OptimizerMemory = find_optimizer(DEFAULT_OPTIMIZER)  # noqa: RUF009 (a constant of the table)


def planned_optimizer(profile: Profile, types: Iterable[str], wanted: str | None) -> PlannedOptimizer:
    """The optimizer to plan with: the wanted one, else the one that the profile was measured with, else sgd.

    Its memory is what the profile measured with it, on the accelerator type that needs most. An optimizer that
    neither a profile nor the table of common ones knows is refused.
    """
    tables = [profile.table(name) for name in types]
    timed = sorted({table.optimizer for table in tables if table.optimizer is not None})
    if wanted is None and len(timed) > 1:
        raise BaPipeError(f"the profile was measured with {' and '.join(timed)}; say which with --optimizer")
    name = wanted or (timed[0] if timed else DEFAULT_OPTIMIZER)
    spec = parse_optimizer(name)
    size = MASTER_BYTES
    if spec.master_weights:
        precision = find_precision(profile.dtype)
        spec.require_for(precision)
        size = precision.weight_bytes
    known = [table for table in tables if table.optimizer == name and table.optimizer_state is not None]
    parameters = sum(layer.parameters for layer in profile.layers)
    each = sum(layer.weight_bytes for layer in profile.layers) / max(1, parameters)
    if any(table.trainable_bytes is not None for table in known):
        each = float(find_precision(profile.dtype).weight_bytes)  # frozen ones may be of another size
    if len(known) < len(tables) or not parameters:
        return PlannedOptimizer(name=name, memory=find_optimizer(name, size))
    memory = OptimizerMemory(
        state=max(table.optimizer_state or 0.0 for table in known) / each,
        workspace=max(table.optimizer_workspace or 0.0 for table in known) / each,
    )
    return PlannedOptimizer(name=name, memory=memory)
