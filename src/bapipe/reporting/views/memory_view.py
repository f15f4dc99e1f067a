"""What fills each rank's memory during a mini-batch: weights, gradients, optimizer, buffers, features."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.evaluate import OPTIMIZER_COPIES
from bapipe.records.plan import Plan
from bapipe.schedule.actions import Kind
from bapipe.simulator.timeline import Timeline

__all__ = ["MemoryView", "RankMemory", "memory_view"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankMemory:
    """Bytes on one rank; all but the features stay the same for the whole mini-batch."""

    rank: int
    accelerator: str
    stages: tuple[int, ...]
    capacity: float
    weights: float
    """every version that the schedule keeps"""
    gradients: float
    """those that are there when the memory is fullest"""
    optimizer: float
    buffers: float
    """for what is received ahead, and the largest layer's workspace where a profile tells it"""
    times: Floats
    """seconds at which the features change"""
    features: Floats
    """bytes live from that time on"""

    @property
    def constant(self) -> float:
        """All but the features."""
        return self.weights + self.gradients + self.optimizer + self.buffers

    @property
    def peak_features(self) -> float:
        return float(self.features.max(initial=0.0))

    @property
    def peak(self) -> float:
        return self.constant + self.peak_features


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryView:
    """The memory of every rank."""

    ranks: tuple[RankMemory, ...]
    exact: bool
    """False: the features are what the plan's peak leaves beside the rest, shaped by the live micro-batches, and
    hold the workspace too"""


def memory_view(plan: Plan, timeline: Timeline) -> MemoryView:
    """Memory of each rank over the plan's predicted timeline; every peak is the plan's `memory_bytes`.

    Where the plan does not tell its stages' stash, or counts memory by another rule, features are inferred from
    the plan's peak.
    """
    stash = [stage.stash_bytes for stage in plan.stages]
    kept = [stage.kept_bytes for stage in plan.stages]
    if None not in stash and None not in kept:
        delayed = [stage.delayed_bytes for stage in plan.stages]
        later = [whole if own is None else own for own, whole in zip(delayed, stash, strict=True)]
        series = timeline.bytes_over_time(
            [item or 0.0 for item in stash], [item or 0.0 for item in kept], [item or 0.0 for item in later]
        )
        ranks = tuple(_at_the_peak(plan, rank, timeline) for rank in _ranks(plan, series))
        if _agrees(plan, ranks):
            return MemoryView(ranks=ranks, exact=True)
    return MemoryView(ranks=_inferred(plan, timeline), exact=False)


def _ranks(plan: Plan, series: list[tuple[Floats, Floats]]) -> tuple[RankMemory, ...]:
    copies = OPTIMIZER_COPIES[plan.optimizer]
    versions = plan.schedule.to_schedule().weight_versions or (1,) * len(plan.stages)
    found = []
    for rank, name in enumerate(plan.ranks):
        own = [number for number, stage in enumerate(plan.stages) if name in stage.accelerators]
        weights = sum(plan.stages[number].weight_bytes for number in own)
        workspace = max((plan.stages[number].workspace_bytes or 0.0 for number in own), default=0.0)
        found.append(
            RankMemory(
                rank=rank,
                accelerator=name,
                stages=tuple(own),
                capacity=min(plan.stages[number].memory_capacity for number in own),
                weights=sum(plan.stages[number].weight_bytes * versions[number] for number in own),
                gradients=weights,
                optimizer=weights * copies,
                buffers=sum(plan.stages[number].buffer_bytes or 0.0 for number in own) + workspace,
                times=series[rank][0],
                features=series[rank][1],
            )
        )
    return tuple(found)


def _at_the_peak(plan: Plan, rank: RankMemory, timeline: Timeline) -> RankMemory:
    """Without the buffers that are not in use when features fill the memory, nor gradients that are not there yet:
    in orders that run all forwards first."""
    over = max(0.0, rank.peak - max(plan.stages[number].memory_bytes for number in rank.stages))
    full = rank.times[rank.features >= rank.peak_features * (1 - 1e-9)]
    makes = (timeline.ranks == rank.rank) & np.isin(timeline.kinds, [int(Kind.B), int(Kind.W)])
    there = bool((timeline.start[makes] < full.max(initial=0.0)).any())
    left = {"gradients": rank.gradients, "buffers": rank.buffers}
    for part in ("buffers", "gradients") if there else ("gradients", "buffers"):
        taken = min(over, left[part])
        left[part] -= taken
        over -= taken
    return replace(rank, gradients=left["gradients"], buffers=left["buffers"])


def _agrees(plan: Plan, ranks: tuple[RankMemory, ...]) -> bool:
    return all(
        math.isclose(
            stage.memory_bytes,
            max(rank.peak for rank in ranks if number in rank.stages),
            rel_tol=1e-6,
            abs_tol=1.0,
        )
        for number, stage in enumerate(plan.stages)
    )


def _inferred(plan: Plan, timeline: Timeline) -> tuple[RankMemory, ...]:
    """Features as the plan's peak leaves them, in proportion to the micro-batches live at the time."""
    plain = _ranks(plan, timeline.bytes_over_time([1.0] * len(plan.stages)))
    recomputes = bool((timeline.kinds == Kind.R).any())
    ranks = []
    for rank in plain:
        peak = max(plan.stages[number].memory_bytes for number in rank.stages)
        left = peak - rank.constant
        most = rank.peak_features
        if recomputes or most <= 0 or left < 0:
            # Counting live micro-batches would not give the shape: show the peak throughout.
            level = np.full(len(rank.times[:1]), max(0.0, left))
            ranks.append(_with_features(rank, peak, rank.times[:1] * 0.0, level))
        else:
            ranks.append(_with_features(rank, peak, rank.times, rank.features * (left / most)))
    return tuple(ranks)


def _with_features(rank: RankMemory, peak: float, times: Floats, features: Floats) -> RankMemory:
    """The rank with other features; where its parts exceed the plan's peak, they are shown as one."""
    known = rank.constant <= peak
    return RankMemory(
        rank=rank.rank,
        accelerator=rank.accelerator,
        stages=rank.stages,
        capacity=rank.capacity,
        weights=rank.weights if known else 0.0,
        gradients=rank.gradients if known else 0.0,
        optimizer=rank.optimizer if known else 0.0,
        buffers=rank.buffers if known else peak,
        times=times,
        features=features,
    )
