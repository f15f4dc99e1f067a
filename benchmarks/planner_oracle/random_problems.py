"""Random small planning problems, each from a seed: any kind that brute force can decide within seconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bapipe.costs.profile import CostTable, Profile, ProfiledLayer
from bapipe.hardware.cluster import Accelerator, AcceleratorType, Cluster, Link
from bapipe.models.layers import ModelRef
from bapipe.planner import Request

__all__ = ["Problem", "problem_of"]

_SCHEDULES = (None, None, None, None, "1f1b", "1f1b", "zb", "gpipe", "1f1b-so", "1f1b-sno")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What the planner is asked, and of what kind it is."""

    seed: int
    profile: Profile
    cluster: Cluster
    request: Request
    kind: str
    """such as "mixed, two nodes, limited, forced" """


def problem_of(seed: int) -> Problem:
    """At most 8 layers, 4 accelerators and 8 micro-batches."""
    rng = np.random.default_rng(seed)

    def coin(chance: float) -> bool:
        return bool(rng.random() < chance)

    layers = int(rng.integers(2, 9))
    count = int(rng.choice([1, 2, 3, 3, 4, 4, 4]))
    microbatches = int(rng.integers(1, 9))
    mixed, nodes = coin(0.45) and count > 1, 2 if coin(0.3) and count > 1 else 1
    limited, phases = coin(0.5), coin(0.5)
    sizes = (1, 2) if coin(0.3) else (1,)
    if len(sizes) > 1:
        microbatches = max(1, microbatches // 2) * 2

    spread = rng.choice([0.2, 0.6, 1.0])
    work = rng.lognormal(0.0, spread, layers)
    back = rng.uniform(1.2, 2.5, layers)
    speeds = {"a": np.ones(layers)}
    if mixed:
        speeds["b"] = rng.uniform(1.1, 3.5) * rng.uniform(0.8, 1.25, layers)
    weights = rng.lognormal(0.0, 1.0, layers) * 1e8
    saved = rng.lognormal(0.0, 0.8, layers) * rng.choice([3e7, 1e8, 3e8])
    boundary = rng.lognormal(0.0, 0.8, layers) * 3e7
    space = rng.lognormal(0.0, 0.6, layers) * 5e7
    ratio = float(np.exp(rng.uniform(np.log(0.005), np.log(2.0))))
    bandwidth = float(boundary.mean() / (ratio * 2.8 * work.sum() / count))

    profile = Profile(
        model=ModelRef(name=f"random-{seed}"),
        dtype="fp32",
        layers=tuple(
            ProfiledLayer(name=f"layer{index}", parameters=int(size // 4), weight_bytes=float(size))
            for index, size in enumerate(weights)
        ),
        accelerators={
            name: _table(work * slower, back, boundary, saved, weights, space if phases else None, sizes)
            for name, slower in speeds.items()
        },
    )
    kinds = ["a" if not mixed or index % 2 == 0 else "b" for index in range(count)]
    rng.shuffle(kinds)
    if mixed and len(set(kinds)) < 2:
        kinds[0] = "b"
    of_node = [f"n{index * nodes // count}" for index in range(count)]
    need = 2 * weights.sum() + saved.sum() * min(microbatches, count)
    room = {
        name: float(need / count * np.exp(rng.uniform(np.log(0.8), np.log(4.0)))) if limited else 1e15
        for name in speeds
    }
    if limited and coin(0.6):
        room = dict.fromkeys(room, room["a"])
    cluster = Cluster(
        name=f"random-{seed}",
        accelerators=tuple(
            Accelerator(name=f"{node}/{index}", type=kind, node=node)
            for index, (kind, node) in enumerate(zip(kinds, of_node, strict=True))
        ),
        types={
            name: AcceleratorType(
                name=name,
                kind="gpu",
                flops={"fp32": 1e13},
                memory=room[name],
                memory_bandwidth=1e12,
                execution="synchronous",
            )
            for name in speeds
        },
        within=Link(bandwidth=bandwidth, latency=1e-4 * float(work.mean())),
        between=Link(bandwidth=bandwidth / rng.uniform(2, 10), latency=1e-3 * float(work.mean()))
        if nodes > 1
        else None,
    )
    schedule = _SCHEDULES[int(rng.integers(len(_SCHEDULES)))]
    stages = int(rng.integers(1, min(count, layers) + 1)) if coin(0.3) else None
    request = Request(
        global_batch=microbatches,
        microbatch=None if len(sizes) > 1 and coin(0.5) else 1,
        schedule=schedule,
        stages=stages,
    )
    words = [
        "mixed" if len(set(kinds)) > 1 else "alike",
        *(["two nodes"] if nodes > 1 else []),
        *(["limited"] if limited else []),
        "free" if schedule is None and stages is None else "forced",
    ]
    return Problem(seed=seed, profile=profile, cluster=cluster, request=request, kind=", ".join(words))


def _table(
    work: np.ndarray,
    back: np.ndarray,
    boundary: np.ndarray,
    saved: np.ndarray,
    weights: np.ndarray,
    space: np.ndarray | None,
    sizes: tuple[int, ...],
) -> CostTable:
    def rows(values: np.ndarray, power: float = 1.0) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple((size**power * values).tolist()) for size in sizes)

    phases = {} if space is None else {"forward_workspace": rows(space), "backward_workspace": rows(1.5 * space)}
    return CostTable(
        source="hand-written",
        description="random",
        microbatches=sizes,
        forward=rows(work, 0.9),
        backward=rows(back * work, 0.9),
        boundary_forward=rows(boundary),
        boundary_backward=rows(boundary),
        saved_activations=rows(saved),
        update=tuple((weights * 1e-10).tolist()),
        **phases,
    )
