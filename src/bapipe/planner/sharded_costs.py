"""The memory of ZeRO-1 and of DDP. FSDP2 is in `bapipe.planner.fsdp_events`, and what collectives take in
`bapipe.planner.gradient_rings`."""

from __future__ import annotations

from bapipe.costs.stage_memory import StageBytes

__all__ = ["ddp_peak", "sharded_copies"]


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
