"""Small profiles and clusters made by hand, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bapipe.costs.profile import CostTable, Profile, ProfiledLayer
from bapipe.hardware.cluster import Accelerator, AcceleratorType, Cluster, Link
from bapipe.models.layers import ModelRef, Split


def made_profile(
    work: dict[str, Sequence[float]],
    *,
    boundary: Sequence[float] | None = None,
    weights: Sequence[float] | None = None,
    saved_activations: Sequence[float] | None = None,
    sizes: Sequence[int] = (1, 2, 4),
    split: dict[int, int] | None = None,
) -> Profile:
    """Layers whose forward is a third of `work` seconds per sample, linear in the micro-batch."""
    count = len(next(iter(work.values())))
    boundary, weights, saved_activations = (
        boundary or [0.0] * count,
        weights or [0.0] * count,
        saved_activations or [0.0] * count,
    )
    return Profile(
        model=ModelRef(name="made"),
        dtype="fp32",
        layers=tuple(
            ProfiledLayer(
                name=f"layer{index}",
                parameters=int(weights[index] // 4),
                weight_bytes=float(weights[index]),
                split=Split(channels=split[index]) if split and index in split else None,
            )
            for index in range(count)
        ),
        accelerators={
            name: CostTable(
                source="hand-written",
                description="made for a test",
                microbatches=tuple(sizes),
                forward=tuple(tuple(size * value / 3 for value in times) for size in sizes),
                backward=tuple(tuple(size * value * 2 / 3 for value in times) for size in sizes),
                boundary_forward=tuple(tuple(size * float(value) for value in boundary) for size in sizes),
                boundary_backward=tuple(tuple(size * float(value) for value in boundary) for size in sizes),
                saved_activations=tuple(
                    tuple(size * float(value) for value in saved_activations) for size in sizes
                ),
                update=(0.0,) * count,
            )
            for name, times in work.items()
        },
    )


def frozen(profile: Profile, trained: Sequence[float]) -> Profile:
    """The same where so many bytes of each layer's weights are trained: what a layer sends has a gradient from the
    first trained layer on; a backward is twice the forward, half of that where all is frozen, nothing before."""
    first = next(index for index, size in enumerate(trained) if size)
    shares = [0.0 if index < first else 1.0 if size else 0.5 for index, size in enumerate(trained)]

    def rows(table: CostTable, name: str, factors: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(map(float.__mul__, row, factors)) for row in getattr(table, name))

    tables = {
        name: replace(
            table,
            trainable_bytes=tuple(map(float, trained)),
            backward=rows(table, "backward", shares),
            boundary_backward=rows(table, "boundary_backward", [float(share > 0) for share in shares]),
            saved_activations=rows(table, "saved_activations", [float(share > 0) for share in shares]),
            weight_gradient=rows(table, "backward", [0.5 if size else 0.0 for size in trained]),
        )
        for name, table in profile.accelerators.items()
    }
    return replace(profile, accelerators=tables)


def made_cluster(
    counts: dict[str, int],
    *,
    bandwidth: float = 1e30,
    memory: float = 1e15,
    topology: str = "full",
    execution: str = "synchronous",
    **more: object,
) -> Cluster:
    """Accelerators of the given types in one node."""
    names = [name for name, count in counts.items() for _ in range(count)]
    return Cluster(
        name="made",
        accelerators=tuple(
            Accelerator(name=f"node/{index}", type=name, node="node") for index, name in enumerate(names)
        ),
        types={
            name: AcceleratorType(
                name=name,
                kind="gpu",
                flops={"fp32": 1e12},
                memory=memory,
                memory_bandwidth=1e12,
                execution=execution,  # type: ignore[arg-type]
            )
            for name in counts
        },
        within=Link(bandwidth=bandwidth),
        topology=topology,  # type: ignore[arg-type]
        **more,  # type: ignore[arg-type]
    )
