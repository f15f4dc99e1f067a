"""What fills each rank's memory: weights, gradients, optimizer state, buffers, saved activations."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bapipe.costs.optimizers import find_optimizer
from bapipe.records.plan import MemoryParts, Plan, PlanStage
from bapipe.simulator.timeline import Timeline

__all__ = ["MemoryView", "RankMemory", "memory_view"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankMemory:
    """Bytes on one rank."""

    rank: int
    accelerator: str
    stages: tuple[int, ...]
    capacity: float
    peak: float
    parts: MemoryParts
    """of the peak"""
    times: Floats
    """seconds at which the saved activations change"""
    activations: Floats
    """bytes held from that time on"""

    @property
    def peak_activations(self) -> float:
        """At any time; more than at the peak where other parts are less meanwhile."""
        return float(self.activations.max(initial=0.0))

    def beside_activations(self) -> dict[str, float]:
        """The other parts as at the peak, less what is not there when saved activations are at their most."""
        parts = self.parts
        over = max(0.0, self.peak_activations - parts.activations)
        buffers = max(0.0, parts.buffers + parts.workspace - over)
        over -= parts.buffers + parts.workspace - buffers
        gradients = max(0.0, parts.gradients - over)
        return {
            "weights": parts.weights,
            "gradients": gradients,
            "optimizer": parts.optimizer,
            "buffers": buffers,
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryView:
    """The memory of every rank."""

    ranks: tuple[RankMemory, ...]
    exact: bool
    """False: saved activations are what the plan's peak leaves beside the rest, shaped by the micro-batches in
    flight, and hold the workspace too"""


def memory_view(plan: Plan, timeline: Timeline) -> MemoryView:
    """Memory of each rank over the plan's predicted timeline; every peak is the plan's `memory_bytes`."""
    known = [stage.saved_bytes is not None for stage in plan.stages]
    saved = [stage.saved_bytes or 0.0 for stage in plan.stages]
    kept = [stage.kept_bytes or 0.0 for stage in plan.stages]
    delayed = [stage.delayed_bytes for stage in plan.stages]
    later = [whole if own is None else own for own, whole in zip(delayed, saved, strict=True)]
    series = timeline.bytes_over_time(saved, kept, later)
    in_flight = timeline.bytes_over_time([1.0] * len(saved))
    ranks = []
    for rank, name in enumerate(plan.ranks):
        own = tuple(number for number, stage in enumerate(plan.stages) if name in stage.accelerators)
        fullest = max((plan.stages[number] for number in own), key=lambda stage: stage.memory_bytes)
        parts = fullest.memory_parts or _inferred(plan, own)
        peak = fullest.on(name).memory_bytes
        times, activations = series[rank]
        if fullest.memory_parts is None or not all(known[number] for number in own):
            times, activations = in_flight[rank]
            activations = activations * (parts.activations / max(1.0, float(activations.max(initial=0.0))))
        ranks.append(
            RankMemory(
                rank=rank,
                accelerator=name,
                stages=own,
                capacity=min(plan.stages[number].on(name).memory_capacity for number in own),
                peak=peak,
                # Replicas differ by how many micro-batches are in flight.
                parts=replace(parts, activations=max(0.0, parts.activations + peak - fullest.memory_bytes)),
                times=times,
                activations=activations,
            )
        )
    return MemoryView(ranks=tuple(ranks), exact=all(stage.memory_parts is not None for stage in plan.stages))


def _inferred(plan: Plan, own: tuple[int, ...]) -> MemoryParts:
    """Of a plan without its parts: weights, gradients and state, and the rest of the peak as saved activations.

    Where those exceed the peak, which then was counted by another rule, all of it is shown as buffers.
    """
    stages = [plan.stages[number] for number in own]
    versions = plan.schedule.to_schedule().weight_versions or (1,) * len(plan.stages)
    trained = sum(_trained(stage) for stage in stages)
    held = sum(
        stage.weight_bytes + (versions[number] - 1) * _trained(stage)
        for number, stage in zip(own, stages, strict=True)
    )
    memory = find_optimizer(plan.optimizer, plan.precision.weight_bytes)
    peak, state = max(stage.memory_bytes for stage in stages), memory.state * trained
    rest = peak - held - trained - state
    if rest < 0:
        return MemoryParts(weights=0.0, gradients=0.0, optimizer=0.0, activations=0.0, buffers=peak, workspace=0.0)
    return MemoryParts(
        weights=held, gradients=trained, optimizer=state, activations=rest, buffers=0.0, workspace=0.0
    )


def _trained(stage: PlanStage) -> float:
    return stage.weight_bytes if stage.trainable_bytes is None else stage.trainable_bytes
