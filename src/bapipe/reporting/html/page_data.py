"""What the page's script draws from: timelines as columns, small enough to stand inside the page."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bapipe.reporting.drawing.action_styles import LOOKS
from bapipe.reporting.drawing.patterns import MARKS
from bapipe.reporting.drawing.rows import consumers, rows_of, waits
from bapipe.reporting.drawing.time_cells import time_range
from bapipe.schedule.actions import Kind
from bapipe.simulator.timeline import Timeline

__all__ = ["kinds_data", "page_data", "script_json", "timeline_data"]

_TICKS = 2**32 - 1
"""ticks of a timeline: times are whole numbers of them, so that actions which touch still touch in the page"""


def page_data(timelines: Mapping[str, Timeline], *, unit: str | None = "s") -> dict[str, Any]:
    """What the page's script needs: the timelines by name, and how kinds look. Plain values that JSON holds."""
    return {
        "unit": unit,
        "kinds": kinds_data(),
        "timelines": [timeline_data(timeline, name=name) for name, timeline in timelines.items()],
    }


def kinds_data() -> list[dict[str, str]]:
    """Letter, name, colour, ink and pattern of each kind, in the order of its number."""
    return [
        {
            "letter": kind.name,
            "name": LOOKS[kind].name,
            "color": LOOKS[kind].color,
            "ink": LOOKS[kind].ink,
            "mark": MARKS[kind],
        }
        for kind in sorted(Kind)
    ]


def timeline_data(timeline: Timeline, *, name: str) -> dict[str, Any]:
    """The timeline as columns, base64 of little-endian numbers.

    Actions are sorted by row and start, so that a row is a range of them and what is visible a range of that.
    Times are ticks after `low`; one tick is `tick` seconds, a 2³²th of the whole. 15 bytes per action, 16 per
    transfer, 12 per wait.
    """
    rows = rows_of(timeline)
    order = np.concatenate([row.actions for row in rows]) if rows else np.zeros(0, np.int64)
    place = np.zeros(len(timeline.kinds), np.int64)
    place[order] = np.arange(len(order))
    low, high = time_range(timeline)
    high = max([high, *timeline.transfers.arrival.tolist()])
    tick = (high - low) / _TICKS if high > low else 1.0

    def ticks(times: NDArray[np.float64]) -> str:
        return _packed(np.clip(np.round((times - low) / tick), 0, _TICKS), "<u4")

    fed = consumers(timeline)
    lost = waits(timeline)
    return {
        "name": name,
        "low": low,
        "end": timeline.makespan,
        "tick": tick,
        "bubble": timeline.bubble,
        "microbatches": timeline.num_microbatches,
        "rows": [
            {"title": row.title, "rank": row.rank, "count": len(row.actions), "reduces": row.is_all_reduce}
            for row in rows
        ],
        "kind": _packed(timeline.kinds[order], "<u1"),
        "stage": _packed(timeline.stages[order], "<u2"),
        "microbatch": _packed(timeline.microbatches[order], "<i4"),
        "start": ticks(timeline.start[order]),
        "finish": ticks(timeline.end[order]),
        "transfers": {
            "source": _packed(place[timeline.transfers.source], "<i4"),
            "fed": _packed(np.where(fed >= 0, place[fed], -1), "<i4"),
            "start": ticks(timeline.transfers.start),
            "arrival": ticks(timeline.transfers.arrival),
        },
        "waits": {
            "action": _packed(place[lost.action], "<i4"),
            "start": ticks(lost.start),
            "end": ticks(lost.end),
        },
    }


def script_json(value: Any) -> str:
    """JSON that may stand between <script> tags: no character of it can end the script or break a line."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _packed(values: NDArray[Any], dtype: str) -> str:
    return base64.b64encode(values.astype(dtype).tobytes()).decode("ascii")
