"""A plan as `bapipe plan --json` prints it, whatever it runs on."""

from __future__ import annotations

import dataclasses
from typing import Any

from bapipe.records.plan import Plan

__all__ = ["flat_plan"]


def flat_plan(plan: Plan, *, dataset_size: int | None) -> dict[str, Any]:
    """A plan's figures in one table; with the number of samples of a dataset, the time of an epoch too."""
    prediction = plan.prediction
    values: dict[str, Any] = {
        "kind": plan.kind,
        "schedule": plan.schedule.name,
        "microbatch_size": plan.microbatch_size,
        "microbatches": plan.microbatches,
        "global_batch": plan.global_batch,
        "precision": plan.dtype,
        "stages": [dataclasses.asdict(stage) for stage in plan.stages],
        "time": prediction.time,
        "low": prediction.low,
        "high": prediction.high,
        "throughput": prediction.throughput,
        "lower_bound": prediction.lower_bound,
        "gap": prediction.gap,
        "bubble": prediction.bubble,
        "source": prediction.source,
        "strategy": plan.strategy,
        "model": plan.model.name,
        "engine": plan.engine,
        "zero_stage": plan.zero_stage,
        "compiled": plan.compiled,
        "alternatives": [dataclasses.asdict(alternative) for alternative in plan.alternatives],
        "notes": list(plan.notes),
    }
    if dataset_size:
        values["epoch_time"] = dataset_size / prediction.throughput
    return values
