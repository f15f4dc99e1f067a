"""Plans made by hand from examples/tiny-profile.json, for tests that run them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bapipe.costs.profile import Profile, read_profile
from bapipe.hardware.cluster import Accelerator, AcceleratorType, Cluster, Link
from bapipe.models.layers import ModelRef
from bapipe.records.plan import Plan, PlanStage, Prediction
from bapipe.schedule.actions import Schedule
from bapipe.schedule.generators import capped, make_schedule, with_update
from bapipe.schedule.schedule_file import ScheduleFile

__all__ = ["CPU", "ROOT", "SMALL", "caps_of", "fragile_plan", "make_plan", "small_plan", "tiny_profile"]

ROOT = Path(__file__).resolve().parents[2]
CPU = AcceleratorType(
    name="cpu-core",
    kind="cpu",
    flops={"fp32": 5e10},
    memory=4e9,
    memory_bandwidth=1e10,
    execution="synchronous",
)


def tiny_profile() -> Profile:
    return read_profile(ROOT / "examples" / "tiny-profile.json")


def _cut(costs: np.ndarray, stages: int) -> list[tuple[int, int]]:
    """Consecutive layers of about equal cost: stage i ends where the running sum passes its share."""
    sums = np.cumsum(costs)
    firsts = [0]
    for stage in range(1, stages):
        end = int(np.searchsorted(sums, sums[-1] * stage / stages))
        firsts.append(min(max(end + 1, firsts[-1] + 1), len(costs) - stages + stage))
    return list(zip(firsts, [*(first - 1 for first in firsts[1:]), len(costs) - 1], strict=True))


def _schedule(name: str, stages: int, microbatches: int) -> Schedule:
    """By name, or `1f1b:3,2,1` with caps."""
    kind, _, caps = name.partition(":")
    if caps:
        return capped(stages, microbatches, [int(cap) for cap in caps.split(",")])
    return make_schedule(kind, stages, microbatches)


def caps_of(plan: Plan) -> tuple[int, ...]:
    """min(M, K_i) of each stage: what may be live at most, and is."""
    assert plan.schedule.caps is not None
    return tuple(min(plan.microbatches, cap) for cap in plan.schedule.caps)


def make_plan(
    schedule: str | Schedule,
    *,
    stages: int = 2,
    microbatches: int = 4,
    microbatch_size: int = 8,
    global_batch: int | None = None,
    optimizer: str = "sgd",
    update: bool = True,
    model: ModelRef | None = None,
    layers: Sequence[str] | None = None,
    dtype: str | None = None,
    nodes: Sequence[str] = ("localhost",),
) -> Plan:
    """A plan for so many CPU ranks, rank r on node r mod their number, the k-th there being k.

    Another model's layers cost what the profile's first ones do.
    """
    profile = tiny_profile()
    names = tuple(layers or (layer.name for layer in profile.layers))
    costs = profile.at("cpu-core", microbatch_size)
    chosen = slice(0, len(names))
    orders = _schedule(schedule, stages, microbatches) if isinstance(schedule, str) else schedule
    if update:
        orders = with_update(orders)
    names_of = [f"{nodes[i % len(nodes)]}/{i // len(nodes)}" for i in range(stages)]
    cluster = Cluster(
        name=f"{stages} CPU ranks",
        accelerators=tuple(
            Accelerator(name=name, type="cpu-core", node=name.partition("/")[0]) for name in names_of
        ),
        types={"cpu-core": CPU},
        within=Link(bandwidth=1e9, latency=50e-6),
        between=Link(bandwidth=1e9, latency=50e-6) if len(nodes) > 1 else None,
    )
    parts = []
    for index, (first, last) in enumerate(_cut((costs.forward + costs.backward)[chosen], stages)):
        span = slice(first, last + 1)
        parts.append(
            PlanStage(
                accelerators=(names_of[index],),
                first_layer=first,
                last_layer=last,
                layers=names[span],
                forward=float(costs.forward[span].sum()),
                backward=float(costs.backward[span].sum()),
                weight_gradient=float(costs.weight_gradient[span].sum()),
                update=float(costs.update[span].sum()),
                send_forward_bytes=float(costs.boundary_forward[last]),
                send_backward_bytes=float(costs.boundary_backward[first - 1]) if first else 0.0,
                weight_bytes=float(profile.weight_bytes[span].sum()),
                memory_bytes=0.0,
                memory_capacity=CPU.memory,
                in_flight=1.0,
            )
        )
    unpredicted = Prediction(
        time=1.0, throughput=1.0, bubble=0.0, exposed_communication=0.0, lower_bound=1.0, gap=0.0, source="none"
    )
    return Plan(
        kind="pipeline",
        model=model or profile.model,
        profile_hash=profile.hash,
        cluster=cluster,
        dtype=dtype or profile.dtype,
        optimizer=optimizer,
        strategy="by hand",
        microbatch_size=microbatch_size,
        microbatches=microbatches,
        global_batch=microbatches * microbatch_size if global_batch is None else global_batch,
        stages=tuple(parts),
        schedule=ScheduleFile.of(orders),
        prediction=unpredicted,
    )


def double(model: ModelRef, **args: int) -> ModelRef:
    """The same model in float64 and with other arguments, which its fingerprint is not of."""
    return replace(model, args={**model.args, **args, "float64": True}, fingerprint=None)


SMALL = ("layer0", "layer1", "layer2", "layer3", "layer4", "head")


def small_plan(schedule: str | Schedule, **options: Any) -> Plan:
    """A plan of a float64 model that is small enough to run many of."""
    model = double(tiny_profile().model, hidden=12, layers=len(SMALL))
    return make_plan(schedule, model=model, layers=SMALL, dtype="fp64", **options)


def fragile_plan(how: str, note: Path | str = "", *, stages: int = 3, **args: Any) -> Plan:
    """Three layers, of which the second does what it is asked to in one of its forwards."""
    model = ModelRef(name="fragile", ref="fragile_model:build", args={"how": how, "note": str(note), **args})
    layers = ("first", "second", "third")
    return make_plan("1f1b-sno", stages=stages, microbatch_size=2, model=model, layers=layers, dtype="fp64")
