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
"""tasks, of one call or of all calls of the process, from which loading numba (about half a second) pays"""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(slots=True)
class _Interpreted:
    """Tasks that plain Python has timed in this process; the results do not depend on it."""

    tasks: int = 0


_INTERPRETED = _Interpreted()


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGraph:
    """Tasks in lane order and what waits for what: one transfer at most from each task, and other edges."""

    lane_start: Ints
    """first task of each lane, and the number of tasks as last entry"""
    lane_of: Ints
    send_to: Ints
    """the task that waits for what this one sends, or -1; no two send to the same"""
    channel: Ints
    """the channel it is sent over, or -1 where both tasks are on one rank"""
    channel_link: Ints
    """the link of each channel; channels of one link wait for each other"""
    uplink_start: Ints
    """first uplink of each channel, and the number of all as last entry"""
    uplink: Ints
    """the uplinks, numbered on from the links: a transfer starts when its link and all its uplinks are free"""
    contended: bool
    """whether some link has several sending lanes, so that links must be claimed in the order of time"""
    edge_start: Ints
    """first other edge of each task, and the number of edges as last entry"""
    edge_to: Ints


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
    send_to: Any,
    channel: Any,
    channel_link: Any,
    uplink_start: Any,
    uplink: Any,
    uplink_occupy: Any,
    occupy: Any,
    latency: Any,
    edge_start: Any,
    edge_to: Any,
    duration: Any,
    cut_through: bool,
    ordered: bool,
    missing: Any,
    link_free: Any,
    start: Any,
    end: Any,
    sent: Any,
    arrival: Any,
    at: Any,
    woken: Any,
    heap_key: Any,
    heap_lane: Any,
) -> int:
    """Fill start, end, sent and arrival; return how many tasks ran. Until a task runs, start holds its last input.

    A lane waits in the heap once the inputs of its next task are there. Ordered: the lane whose task claims its
    link first is taken first (ties: lower lane) and runs that one task. Unordered: the heap is a stack and a lane
    runs as far ahead as it can, which is exact while every link has one sending lane.
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
            child = size
            size += 1
            key = 0.0
            if ordered:
                task = at[lane]
                key = start[task]
                if task > lane_start[lane] and end[task - 1] > key:
                    key = end[task - 1]
                if not cut_through:
                    key += duration[task]
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
        wakes = 0
        task = at[lane]
        stop = lane_start[lane + 1]
        now = end[task - 1] if task > lane_start[lane] else 0.0
        while task < stop and missing[task] == 0:
            begin = start[task] if start[task] > now else now
            now = begin + duration[task]
            start[task] = begin
            end[task] = now
            done += 1
            target = send_to[task]
            if target >= 0:
                when = now
                over = channel[task]
                if over >= 0:
                    link = channel_link[over]
                    claim = begin if cut_through else now
                    if link_free[link] > claim:
                        claim = link_free[link]
                    if len(uplink) > 0:
                        for crossed in range(uplink_start[over], uplink_start[over + 1]):
                            if link_free[uplink[crossed]] > claim:
                                claim = link_free[uplink[crossed]]
                        for crossed in range(uplink_start[over], uplink_start[over + 1]):
                            link_free[uplink[crossed]] = claim + uplink_occupy[crossed]
                    sent[task] = claim
                    link_free[link] = claim + occupy[over]
                    through = claim + occupy[over] + latency[over]
                    if through > when:
                        when = through
                    arrival[task] = when
                if when > start[target]:
                    start[target] = when
                missing[target] -= 1
                other = lane_of[target]
                if missing[target] == 0 and at[other] == target and other != lane:
                    woken[wakes] = other
                    wakes += 1
            if len(edge_to) > 0:
                for edge in range(edge_start[task], edge_start[task + 1]):
                    target = edge_to[edge]
                    if now > start[target]:
                        start[target] = now
                    missing[target] -= 1
                    other = lane_of[target]
                    if missing[target] == 0 and at[other] == target and other != lane:
                        woken[wakes] = other
                        wakes += 1
            task += 1
            if ordered:
                break
        at[lane] = task
        if ordered and task < stop and missing[task] == 0:
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
    occupy: Floats,
    latency: Floats,
    uplink_occupy: Floats | None = None,
    cut_through: bool = False,
    engine: Engine = "auto",
) -> TaskTimes:
    """Time all tasks. What is sent over a channel holds its link for `occupy` and arrives `latency` later.

    It holds each of its uplinks for `uplink_occupy`, which is no longer than `occupy`.
    A transfer starts when the compute that makes it ends, or with `cut_through` when it starts.
    """
    tasks, lanes = len(duration), len(graph.lane_start) - 1
    missing = np.zeros(tasks + 1, np.int64)
    missing[graph.send_to] = 1  # the -1 of a task that sends nothing falls on the extra last entry
    if len(graph.edge_to):
        missing += np.bincount(graph.edge_to, minlength=tasks + 1)
    start, end, sent, arrival = results = np.empty((4, tasks))
    start[:], results[1:] = 0.0, np.nan
    arguments: list[Any] = [
        graph.lane_start,
        graph.lane_of,
        graph.send_to,
        graph.channel,
        graph.channel_link,
        graph.uplink_start,
        graph.uplink,
        np.zeros(len(graph.uplink)) if uplink_occupy is None else uplink_occupy,
        occupy,
        latency,
        graph.edge_start,
        graph.edge_to,
        duration,
        cut_through,
        graph.contended,
        missing,
        np.zeros(max(len(graph.channel_link), int(graph.uplink.max(initial=-1)) + 1)),
        start,
        end,
        sent,
        arrival,
        np.zeros(lanes, np.int64),
        np.zeros(lanes + 1, np.int64),
        np.zeros(lanes + 1),
        np.zeros(lanes + 1, np.int64),
    ]
    many = tasks + _INTERPRETED.tasks >= NUMBA_FROM or "numba" in sys.modules
    wants_numba = engine == "numba" or (engine == "auto" and many and numba_available())
    if wants_numba:
        done = _compiled()(*arguments)
    else:
        # Plain lists: indexing a numpy array element by element is several times slower.
        lists = [item.tolist() if isinstance(item, np.ndarray) else item for item in arguments]
        done = _kernel(*lists)
        _INTERPRETED.tasks += tasks
        for array, values in zip((start, end, sent, arrival), lists[17:21], strict=True):
            array[:] = values
    return TaskTimes(start=start, end=end, sent=sent, arrival=arrival, done=done)
