"""Timelines as a Chrome trace, which ui.perfetto.dev and chrome://tracing open: prediction and run together.

The format is the Trace Event Format's JSON object with complete events (`X`), names (`M`) and flows (`s`, `f`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bapipe.errors import BaPipeError
from bapipe.reporting.drawing.action_styles import LOOKS
from bapipe.reporting.drawing.labels import action_name
from bapipe.reporting.drawing.rows import consumers, rows_of
from bapipe.schedule.actions import Kind
from bapipe.simulator.timeline import Timeline

__all__ = ["trace_events", "trace_json"]

Event = dict[str, Any]
_LONGEST = 9e9
_FLOWS_PER_PROCESS = 2**32
"""keeps the ids of different timelines' transfers apart, within the integers that JavaScript holds exactly"""


def trace_events(timeline: Timeline, *, name: str = "predicted", process: int = 0) -> list[Event]:
    """The timeline's events: a process named `name` with a thread per rank and lane.

    `process` counts the timelines that share a file; its pid is one more, since Perfetto takes 0 for the idle
    process. Every action is one complete event in microseconds, rounded to nanoseconds so that actions which
    touch never overlap; every transfer is a flow from the action that made it to the one that needs it. A timeline
    of more than 285 years is refused: it has more nanoseconds than 64 bits count.
    """
    if timeline.makespan > _LONGEST:
        raise BaPipeError(
            f"a trace lasts {_LONGEST:g} s at most, this one {timeline.makespan:g} s; leave --trace out"
        )
    pid = process + 1
    events: list[Event] = [
        _named("process_name", pid, 0, name=name),
        _named("process_sort_index", pid, 0, sort_index=process),
    ]
    thread = np.zeros(len(timeline.kinds), np.int64)
    for tid, row in enumerate(rows_of(timeline), start=1):
        thread[row.actions] = tid
        events.append(_named("thread_name", pid, tid, name=row.title))
        events.append(_named("thread_sort_index", pid, tid, sort_index=tid))

    start, end = (np.round(times * 1e9).astype(np.int64) for times in (timeline.start, timeline.end))
    begin, lasts = _microseconds(start).tolist(), _microseconds(end - start).tolist()
    threads: list[int] = thread.tolist()
    for index in range(len(threads)):
        kind, microbatch = Kind(int(timeline.kinds[index])), int(timeline.microbatches[index])
        about = {"stage": int(timeline.stages[index]), "work_us": float(timeline.work[index]) * 1e6}
        events.append(
            {
                "ph": "X",
                "pid": pid,
                "tid": threads[index],
                "ts": begin[index],
                "dur": lasts[index],
                "name": action_name(timeline, index),
                "cat": LOOKS[kind].name,
                "args": about if microbatch < 0 else {**about, "microbatch": microbatch},
            }
        )
    pairs = zip(timeline.transfers.source.tolist(), consumers(timeline).tolist(), strict=True)
    for number, (source, fed) in enumerate(pairs):
        if fed >= 0:
            flow = {"pid": pid, "name": "transfer", "cat": "transfer"}
            flow["id"] = process * _FLOWS_PER_PROCESS + number
            # A flow belongs to the slice that is open at its time, which at a slice's end is none or the next.
            events.append({"ph": "s", "tid": threads[source], "ts": begin[source], **flow})
            events.append({"ph": "f", "bp": "e", "tid": threads[fed], "ts": begin[fed], **flow})
    return events


def trace_json(timelines: Mapping[str, Timeline]) -> str:
    """One trace of several timelines, each a process of that name, as the text of a JSON file."""
    events = [
        event
        for process, (name, timeline) in enumerate(timelines.items())
        for event in trace_events(timeline, name=name, process=process)
    ]
    trace = {"traceEvents": events, "displayTimeUnit": "ms"}
    return json.dumps(trace, allow_nan=False, separators=(",", ":"))


def _named(what: str, pid: int, tid: int, **args: str | int) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}


def _microseconds(nanoseconds: NDArray[np.int64]) -> NDArray[np.float64]:
    """As fractions of which a reader that truncates gets the same nanoseconds back, not one fewer."""
    value = nanoseconds / 1000.0
    short = np.floor(value * 1000.0) < nanoseconds
    return np.where(short, np.nextafter(value, np.inf), value)
