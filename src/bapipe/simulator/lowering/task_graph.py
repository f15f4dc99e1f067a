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
    sources, targets = [], []
    reduces = np.flatnonzero(kinds == int(Kind.A)).tolist()
    if reduces:
        gradients = np.flatnonzero((kinds == Kind.B) | (kinds == Kind.W))
        places = zip(stages[gradients].tolist(), ranks[gradients].tolist(), strict=True)
        last = dict(zip(places, gradients.tolist(), strict=True))
        for task in reduces:
            for rank in schedule.placement[int(stages[task])]:
                if (int(stages[task]), rank) in last:
                    sources.append(last[int(stages[task]), rank])
                    targets.append(task)
        reduced = {(int(stages[task]), int(ranks[task])): task for task in reduces}
        for task in np.flatnonzero(kinds == Kind.U).tolist():
            before = reduced.get((int(stages[task]), int(ranks[task])))
            if before is not None:
                sources.append(before)
                targets.append(task)
    return np.array(sources, dtype=np.int64), np.array(targets, dtype=np.int64)


def sorted_edges(source: Ints, target: Ints, tasks: int) -> tuple[Ints, Ints]:
    """Edges as (first edge of each task, target of each edge)."""
    starts = np.zeros(tasks + 1, np.int64)
    if not len(source):
        return starts, target
    np.cumsum(np.bincount(source, minlength=tasks), out=starts[1:])
    return starts, target[np.argsort(source, kind="stable")]
