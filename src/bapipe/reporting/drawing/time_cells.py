"""What fills each cell of a drawing whose rows are cut into equal stretches of time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bapipe.reporting.drawing.rows import Row, waits
from bapipe.schedule.actions import Kind
from bapipe.simulator.timeline import Timeline

__all__ = ["IDLE", "WAITING", "Cells", "aligned_columns", "fill_cells", "time_range"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
IDLE, WAITING = -1, -2
"""owners of a cell in which no action takes most of the time"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cells:
    """Rows × columns of a drawing."""

    owner: Ints
    """for each cell the index of the action that it shows, or IDLE or WAITING"""
    share: Floats
    """rows × columns × kinds: the part of the cell's time that each kind takes"""


def time_range(timeline: Timeline) -> tuple[float, float]:
    """Where a drawing begins and ends: from 0, or the first start if a recorded clock put it before 0."""
    if not len(timeline.start):
        return 0.0, 0.0
    return min(0.0, float(timeline.start.min())), timeline.makespan


def aligned_columns(timeline: Timeline, available: int) -> int:
    """The most columns of those available with which every start and end falls between two columns.

    That is possible where all times are multiples of one quantum no finer than a column, as with whole-number
    costs; equal actions are then drawn equally long. Where it is not, all available columns.
    """
    low, high = time_range(timeline)
    if high <= low:
        return available
    position = (np.concatenate([timeline.start, timeline.end]) - low) / (high - low)
    for quanta in range(1, available + 1):
        # A few positions rule out nearly every candidate.
        if _whole(position[:64] * quanta) and _whole(position * quanta):
            return quanta * (available // quanta)
    return available


def _whole(values: Floats) -> bool:
    return bool((np.abs(values - np.round(values)) < 1e-6).all())


def fill_cells(timeline: Timeline, rows: Sequence[Row], columns: int) -> Cells:
    """Cut the rows into columns and see what takes most of each cell's time.

    Of the kinds, and of doing nothing, the one with the most time wins the cell; the cell then belongs to that
    kind's longest action in it. Linear in the actions plus the cells, but for one sort.
    """
    low, high = time_range(timeline)
    scale = columns / (high - low)
    shape = (len(rows), columns)
    row_of = np.full(len(timeline.kinds), -1, np.int64)
    for number, row in enumerate(rows):
        row_of[row.actions] = number

    index = np.flatnonzero(row_of >= 0)
    which, column, part = _spread(
        (timeline.start[index] - low) * scale, (timeline.end[index] - low) * scale, columns
    )
    action = index[which]
    cell = row_of[action] * columns + column
    kind = timeline.kinds[action]
    share = _sums(cell * len(Kind) + kind, part, len(rows) * columns * len(Kind)).reshape(-1, len(Kind))

    lost = waits(timeline)
    drawn = row_of[lost.action] >= 0
    which, column, waited = _spread((lost.start[drawn] - low) * scale, (lost.end[drawn] - low) * scale, columns)
    waiting = _sums(row_of[lost.action[drawn][which]] * columns + column, waited, len(share))

    idle = np.round(1.0 - share.sum(axis=1), 9)
    winner = np.where(idle > np.round(share.max(axis=1), 9), -1, np.round(share, 9).argmax(axis=1))
    owner = np.where(waiting > idle / 2, WAITING, IDLE)
    owner[winner >= 0] = IDLE
    candidate = np.flatnonzero(kind == winner[cell])
    best = candidate[np.lexsort((-action[candidate], np.round(part[candidate], 9), cell[candidate]))]
    owner[cell[best]] = action[best]
    return Cells(owner=owner.reshape(shape), share=share.reshape(*shape, len(Kind)))


def _sums(place: Ints, amount: Floats, size: int) -> Floats:
    total: Floats = np.bincount(place, amount, minlength=size).astype(np.float64)
    return total


def _spread(start: Floats, end: Floats, columns: int) -> tuple[Ints, Ints, Floats]:
    """Cut stretches, in columns, at the column edges: stretch, column and length of each piece."""
    # Rounding keeps an end that is a hair past an edge out of the next column.
    start, end = np.round(start, 6), np.round(end, 6)
    first = np.clip(np.floor(start), 0, columns - 1).astype(np.int64)
    last = np.clip(np.ceil(end) - 1, first, columns - 1).astype(np.int64)
    pieces = last - first + 1
    which = np.repeat(np.arange(len(start), dtype=np.int64), pieces)
    step = np.arange(len(which), dtype=np.int64) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    column = first[which] + step
    length = np.minimum(end[which], column + 1.0) - np.maximum(start[which], column)
    keep = length > 0
    return which[keep], column[keep], length[keep]
