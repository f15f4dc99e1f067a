"""The rows of a drawing: one per rank and lane, and what each waits for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bapipe.schedule.actions import Kind
from bapipe.simulator.timeline import Timeline

__all__ = ["Row", "Waits", "consumers", "rows_of", "waits"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Row:
    """The actions of one lane of one rank."""

    rank: int
    lane: int
    name: str
    """what the lane is for; empty where the rank has no other lane of compute"""
    actions: Ints
    """indices into the timeline, in the order of their start"""
    is_all_reduce: bool = False

    @property
    def title(self) -> str:
        """`rank 3` or `rank 3 backward`."""
        return f"rank {self.rank} {self.name}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Waits:
    """Idle stretches of lanes during which the next action's input is on a link."""

    action: Ints
    """index of the action that waits"""
    start: Floats
    end: Floats


def rows_of(timeline: Timeline) -> list[Row]:
    """One row per rank and lane, by rank; a rank without actions has one empty row. Cost: one sort."""
    order = np.lexsort((timeline.start, timeline.lanes, timeline.ranks))
    ranks, lanes = timeline.ranks[order], timeline.lanes[order]
    changes = np.flatnonzero((np.diff(ranks) != 0) | (np.diff(lanes) != 0)) + 1
    groups: dict[int, list[Ints]] = {rank: [] for rank in range(timeline.num_ranks)}
    for actions in np.split(order, changes) if len(order) else []:
        groups[int(timeline.ranks[actions[0]])].append(actions)
    rows = []
    for rank, found in groups.items():
        kinds = [{Kind(int(kind)) for kind in np.unique(timeline.kinds[own])} for own in found]
        computing = sum(own != {Kind.A} for own in kinds)
        if not found:
            rows.append(Row(rank=rank, lane=0, name="", actions=np.zeros(0, np.int64)))
        for own, actions in zip(kinds, found, strict=True):
            lane, reduces = int(timeline.lanes[actions[0]]), own == {Kind.A}
            name = _lane_name(own, lane) if reduces or computing > 1 else ""
            rows.append(Row(rank=rank, lane=lane, name=name, actions=actions, is_all_reduce=reduces))
    return rows


def _lane_name(kinds: set[Kind], lane: int) -> str:
    if kinds == {Kind.A}:
        return "all-reduce"
    if kinds == {Kind.F}:
        return "forward"
    return f"lane {lane}" if Kind.F in kinds else "backward"


def consumers(timeline: Timeline) -> Ints:
    """For each transfer the index of the action that it feeds, or -1."""
    return timeline.consumers()


def waits(timeline: Timeline) -> Waits:
    """Where a lane is idle while its next input is on a link; their sum is the exposed communication."""
    fed = consumers(timeline)
    known = fed >= 0
    action, source = fed[known], timeline.transfers.source[known]
    start = np.maximum(timeline.previous_end()[action], timeline.end[source])
    end = np.minimum(timeline.start[action], timeline.transfers.arrival[known])
    real = end > start
    return Waits(action=action[real], start=start[real], end=end[real])
