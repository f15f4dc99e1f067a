"""What lowering makes, and the parts of it that are alike with sends that block and sends that do not."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bapipe.schedule.actions import Kind, Lane, Schedule
from bapipe.simulator.engine import TaskGraph

__all__ = [
    "BACKWARD_MESSAGE",
    "EXCHANGE",
    "FORWARD_MESSAGE",
    "Channel",
    "Ints",
    "Lowered",
    "lane_numbers",
    "sorted_edges",
    "update_waits",
]

Ints = NDArray[np.int64]
FORWARD_MESSAGE, BACKWARD_MESSAGE, EXCHANGE = 7, 8, 9
"""task kinds beyond `Kind`: a blocking transfer each way, and a rank standing still for it"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """One direction over one boundary, from one replica to one."""

    boundary: int
    """the stage before it"""
    onward: bool
    """True for activations, False for errors"""
    from_rank: int
    to_rank: int
    rate: float
    """seconds per unit of what crosses"""
    latency: float
    uplinks: tuple[tuple[Hashable, float], ...] = ()
    """what it crosses besides, each with its own seconds per unit"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lowered:
    """A task graph and what each task stands for."""

    graph: TaskGraph
    kinds: Ints
    stages: Ints
    """for a message: the stage before its boundary"""
    microbatches: Ints
    ranks: Ints
    lanes: Ints
    """0 for a rank's first lane, 1 for its second…"""
    channels: tuple[Channel, ...]
    """what the tasks send over; with blocking sends, one per message task"""
    senders: Ints
    """the actions whose output goes to another rank, each by its number among the actions"""
    receiving_ranks: Ints
    """for each of them that rank"""
    receivers: Ints | None = None
    """for each of them the action that it feeds, or -1; None with blocking sends"""
    first_message: int | None = None
    """with blocking sends, the first of the message tasks, which come last"""


def lane_numbers(lanes: Sequence[Lane]) -> list[int]:
    """Of each lane, which of its rank's lanes it is."""
    seen: dict[int, int] = {}
    numbers = []
    for lane in lanes:
        numbers.append(seen.get(lane.rank, 0))
        seen[lane.rank] = numbers[-1] + 1
    return numbers


def update_waits(schedule: Schedule, kinds: Ints, stages: Ints, ranks: Ints) -> tuple[Ints, Ints]:
    """Every replica's last gradient -> every replica's all-reduce -> that replica's optimizer step."""
    reduces = np.flatnonzero(kinds == int(Kind.A))
    if not len(reduces):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    gradients = np.flatnonzero((kinds == int(Kind.B)) | (kinds == int(Kind.W)))
    last, reduced = np.full((2, schedule.num_stages, schedule.num_ranks), -1, np.int64)
    np.maximum.at(last, (stages[gradients], ranks[gradients]), gradients)
    reduced[stages[reduces], ranks[reduces]] = reduces
    of_stage = {stage: last[stage, list(schedule.placement[stage])] for stage in set(stages[reduces].tolist())}
    made = [of_stage[stage] for stage in stages[reduces].tolist()]
    updates = np.flatnonzero(kinds == int(Kind.U))
    sources = np.concatenate([*made, reduced[stages[updates], ranks[updates]]])
    targets = np.concatenate([np.repeat(reduces, [len(own) for own in made]), updates])
    return sources[sources >= 0], targets[sources >= 0]


def sorted_edges(source: Ints, target: Ints, tasks: int) -> tuple[Ints, Ints]:
    """Edges as (first edge of each task, target of each edge)."""
    starts = np.zeros(tasks + 1, np.int64)
    if not len(source):
        return starts, target
    np.cumsum(np.bincount(source, minlength=tasks), out=starts[1:])
    return starts, target[np.argsort(source, kind="stable")]
