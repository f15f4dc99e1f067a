"""What it costs to shard training over replicas: collectives, and the memory of ZeRO-1 and of DDP.

FSDP2 is in `bapipe.planner.fsdp_events`.

A ring's reduce-scatter and all-gather each take half of its all-reduce. gloo, over which CPUs talk, makes a
reduce-scatter of a whole all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence

from bapipe.costs.stage_memory import StageBytes
from bapipe.hardware.cluster import Cluster
from bapipe.planner.gradient_rings import AllReduce

__all__ = ["ddp_peak", "gather_time", "on_gpus", "scatter_share", "scatter_time", "sharded_copies"]


def on_gpus(cluster: Cluster, members: Sequence[int]) -> bool:
    """Whether collectives run beside the compute, by NCCL; else they go by gloo and are waited for."""
    return all(cluster.type_of(index).kind == "gpu" for index in members)


def scatter_share(cluster: Cluster, members: Sequence[int]) -> float:
    """What a reduce-scatter takes of the all-reduce of as many bytes."""
    return 0.5 if on_gpus(cluster, members) else 1.0


def gather_time(reduce: AllReduce, size: float) -> float:
    """Seconds of an all-gather, among those that `reduce`, after which each has so many bytes."""
    return 0.5 * reduce.seconds(size) if size > 0 else 0.0


def scatter_time(reduce: AllReduce, share: float, gradients: float) -> float:
    """Seconds of a reduce-scatter of so many bytes of gradients, given its `scatter_share`; where all is frozen
    nothing is sent."""
    return share * reduce.seconds(gradients) if gradients > 0 else 0.0


def sharded_copies(state: float, workspace: float, replicas: int) -> tuple[float, float]:
    """Under ZeRO-1, in copies of what is trained: weights, gradients and optimizer state of a replica, and those
    and what the step makes. In the step only a replica's share of the gradients is left."""
    always = 2 + state / replicas
    return always, max(always, 1 + (1 + state + workspace) / replicas)


def ddp_peak(needed: StageBytes, *, state: float, workspace: float) -> dict[str, float]:
    """Most that a rank of torch's DDP holds, by the parts of `PeakBytes`.

    Its gradients are there from the start on, in the buckets that it sums, and nowhere else. The optimizer's
    `state` and `workspace` are in copies of what is trained.
    """
    step = workspace * needed.trained
    both = needed.saved_activations + needed.workspace + needed.casts > step
    return {
        "weights": needed.weights + (needed.casts if both else 0.0),
        "gradients": needed.trained,
        "optimizer": state * needed.trained,
        "activations": needed.saved_activations if both else 0.0,
        "buffers": 0.0,
        "workspace": needed.workspace if both else step,
    }
