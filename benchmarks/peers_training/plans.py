"""What is done with the plans of this benchmark: equal stages of them, and what a row says of its plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bapipe.planner.partition.baselines import uniform
from bapipe.records.plan import Plan, read_plan

__all__ = ["equal_stages", "of_plan"]


def equal_stages(plan: Plan) -> Plan:
    """The plan with stages of equally many layers."""
    layers = list(
        dict.fromkeys(
            (stage.first_layer + at, name) for stage in plan.stages for at, name in enumerate(stage.layers)
        )
    )
    edges = [0, *uniform(len(layers), len(plan.stages)), len(layers)]
    stages = [
        replace(
            stage,
            first_layer=first,
            last_layer=after - 1,
            layers=tuple(name for _, name in layers[first:after]),
            fractions=(),
            modules=(),
            tied=(),
            trainable_bytes=None,
            recompute=False,
            recompute_layers=(),
        )
        for stage, first, after in zip(plan.stages, edges[:-1], edges[1:], strict=True)
    ]
    return replace(plan, stages=tuple(stages))


def of_plan(job: dict[str, Any]) -> dict[str, Any]:
    """What its plan says of a row."""
    if "plan" not in job:
        return {"schedule": {"ddp": "DistributedDataParallel", "fsdp": "FSDP2"}[job["kind"]]}
    plan = read_plan(job["plan"])
    found: dict[str, Any] = {
        "schedule": job["schedule"] or plan.schedule.name,
        "stages": [f"{stage.first_layer}-{stage.last_layer}" for stage in plan.stages],
    }
    if job["kind"] == "ours":
        by_rank = dict.fromkeys(plan.ranks, 0.0)
        for stage in plan.stages:
            for name in stage.accelerators:
                by_rank[name] = max(by_rank[name], stage.on(name).memory_bytes)
        found |= {"kind": plan.kind, "predicted": plan.prediction.time, "predicted_memory": list(by_rank.values())}
    return found
