"""The timing kernel: when every task of a lowered schedule starts and ends.

end = max(end of predecessors, end of the previous task on its lane, arrival of its input) + duration. The same
source runs compiled by numba, if that is installed, and as plain Python, with bit-identical results. Cost: linear
in tasks; with contended links, a heap of at most one entry per lane on top.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

__all__ = ["NUMBA_FROM", "Engine", "TaskGraph", "TaskTimes", "numba_available", "time_tasks"]

Engine = Literal["auto", "numba", "python"]
NUMBA_FROM = 100_000
"""tasks from which loading numba (about half a second) pays for itself"""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGraph:
    """Tasks in lane order, and the edges between them, sorted by the task they leave."""

    lane_start: Ints
    """first task of each lane, and the number of tasks as last entry"""
    lane_of: Ints
    edge_start: Ints
    """first edge of each task, and the number of edges as last entry"""
    edge_to: Ints
    edge_link: Ints
    """the link an edge's data crosses, or -1"""
    num_links: int
    contended: bool
    """whether some link has several sending lanes, so that links must be claimed in the order of time"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTimes:
    """When each task ran and when its data crossed a link; NaN where it did not."""

    start: Floats
    end: Floats
    sent: Floats
    arrival: Floats
    done: int
    """tasks that could run; fewer than all is a deadlock"""


def _kernel(
    lane_start: Any,
    lane_of: Any,
    edge_start: Any,
    edge_to: Any,
    edge_link: Any,
    edge_occupy: Any,
    edge_latency: Any,
    duration: Any,
    cut_through: Any,
    ordered: bool,
    missing: Any,
    link_free: Any,
    ready: Any,
    start: Any,
    end: Any,
    sent: Any,
    arrival: Any,
    at: Any,
    woken: Any,
    heap_key: Any,
    heap_lane: Any,
) -> int:
    """Fill start, end, sent and arrival; return how many tasks ran.

    Each lane waits in a heap with its next task, once that task's inputs are there. Ordered: the lane whose task
    claims its link first is taken first (ties: lower lane). Unordered: the heap is a stack and lanes run ahead,
    which is exact while every link has one sending lane.
    """
    lanes = len(lane_start) - 1
    wakes = 0
    for lane in range(lanes):
        at[lane] = lane_start[lane]
        if lane_start[lane] < lane_start[lane + 1] and missing[lane_start[lane]] == 0:
            woken[wakes] = lane
            wakes += 1
    size = 0
    done = 0
    while True:
        for index in range(wakes):
            lane = woken[index]
            task = at[lane]
            begin = ready[task]
            if task > lane_start[lane] and end[task - 1] > begin:
                begin = end[task - 1]
            start[task] = begin
            end[task] = begin + duration[task]
            key = begin if cut_through[task] else end[task]
            child = size
            size += 1
            while ordered and child > 0:
                parent = (child - 1) >> 1
                if heap_key[parent] < key or (heap_key[parent] == key and heap_lane[parent] < lane):
                    break
                heap_key[child] = heap_key[parent]
                heap_lane[child] = heap_lane[parent]
                child = parent
            heap_key[child] = key
            heap_lane[child] = lane
        if size == 0:
            return done
        size -= 1
        last = heap_lane[size]
        lane = last
        if ordered:
            lane = heap_lane[0]
            key = heap_key[size]
            hole = 0
            while 2 * hole + 1 < size:
                child = 2 * hole + 1
                right = child + 1
                if right < size and (
                    heap_key[right] < heap_key[child]
                    or (heap_key[right] == heap_key[child] and heap_lane[right] < heap_lane[child])
                ):
                    child = right
                if key < heap_key[child] or (key == heap_key[child] and last < heap_lane[child]):
                    break
                heap_key[hole] = heap_key[child]
                heap_lane[hole] = heap_lane[child]
                hole = child
            heap_key[hole] = key
            heap_lane[hole] = last
        task = at[lane]
        at[lane] = task + 1
        done += 1
        wakes = 0
        for edge in range(edge_start[task], edge_start[task + 1]):
            when = end[task]
            link = edge_link[edge]
            if link >= 0:
                claim = start[task] if cut_through[task] else end[task]
                if link_free[link] > claim:
                    claim = link_free[link]
                sent[task] = claim
                link_free[link] = claim + edge_occupy[edge]
                through = claim + edge_occupy[edge] + edge_latency[edge]
                if through > when:
                    when = through
                arrival[task] = when
            target = edge_to[edge]
            if when > ready[target]:
                ready[target] = when
            missing[target] -= 1
            other = lane_of[target]
            if missing[target] == 0 and at[other] == target and other != lane:
                woken[wakes] = other
                wakes += 1
        if at[lane] < lane_start[lane + 1] and missing[at[lane]] == 0:
            woken[wakes] = lane
            wakes += 1


def numba_available() -> bool:
    """Whether numba is installed; it is not imported for that."""
    return importlib.util.find_spec("numba") is not None


@functools.cache
def _compiled() -> Callable[..., int]:
    import numba

    return numba.njit(cache=True)(_kernel)


def time_tasks(
    graph: TaskGraph,
    *,
    duration: Floats,
    edge_occupy: Floats,
    edge_latency: Floats,
    cut_through: NDArray[np.bool_],
    engine: Engine = "auto",
) -> TaskTimes:
    """Time all tasks. An edge over a link holds the link for `edge_occupy` and arrives `edge_latency` later."""
    tasks, lanes = len(duration), len(graph.lane_start) - 1
    missing = np.bincount(graph.edge_to, minlength=tasks)
    start, end, sent, arrival = (np.full(tasks, np.nan) for _ in range(4))
    arguments: list[Any] = [
        graph.lane_start,
        graph.lane_of,
        graph.edge_start,
        graph.edge_to,
        graph.edge_link,
        edge_occupy,
        edge_latency,
        duration,
        cut_through,
        graph.contended,
        missing,
        np.zeros(graph.num_links),
        np.zeros(tasks),
        start,
        end,
        sent,
        arrival,
        np.zeros(lanes, np.int64),
        np.zeros(lanes + 1, np.int64),
        np.zeros(lanes + 1),
        np.zeros(lanes + 1, np.int64),
    ]
    wants_numba = engine == "numba" or (
        engine == "auto" and (tasks >= NUMBA_FROM or "numba" in sys.modules) and numba_available()
    )
    if wants_numba:
        done = _compiled()(*arguments)
    else:
        # Plain lists: indexing a numpy array element by element is several times slower.
        lists = [item.tolist() if isinstance(item, np.ndarray) else item for item in arguments]
        done = _kernel(*lists)
        for array, values in zip((start, end, sent, arrival), lists[13:17], strict=True):
            array[:] = values
    return TaskTimes(start=start, end=end, sent=sent, arrival=arrival, done=done)
