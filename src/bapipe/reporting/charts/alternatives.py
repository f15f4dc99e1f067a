"""The plan and its alternatives by time and memory, with the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence

from bapipe.records.plan import Plan
from bapipe.reporting.charts.frame import WIDTH, Chart, Scale, label, legend, safe, short, x_axis, y_axis
from bapipe.units import format_bytes, format_seconds

__all__ = ["alternatives_chart", "pareto_front"]

_LEFT, _RIGHT, _TOP, _BOTTOM = 66.0, WIDTH - 96, 20.0, 300.0
_MISFITS = WIDTH - 48
"""x of what does not fit and so has no time"""


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that no other beats in one figure without losing in the other, by the first figure.

    pareto_front([(1, 5), (2, 3), (3, 4)]) -> [0, 1]
    """
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda each: points[each]):
        if not front or points[index][1] < points[front[-1]][1]:
            front.append(index)
    return front


def alternatives_chart(plan: Plan) -> Chart:
    """Time against memory on the fullest accelerator; labels are the rows of the page's table, 0 the plan."""
    own = (plan.prediction.time, max(stage.memory_bytes for stage in plan.stages))
    timed = [(0, plan.schedule.name, own)] + [
        (number, alternative.name, (alternative.time, alternative.memory_bytes))
        for number, alternative in enumerate(plan.alternatives, start=1)
        if alternative.time is not None
    ]
    misfits = [(number, r) for number, r in enumerate(plan.alternatives, start=1) if r.time is None]
    times = [point[0] for _, _, point in timed]
    capacity = min(stage.memory_capacity for stage in plan.stages)
    sizes = [point[1] for _, _, point in timed] + [alternative.memory_bytes for _, alternative in misfits]
    x = _scale(times, _LEFT, _RIGHT)
    reach = [*sizes, capacity] if 0 < capacity < 20 * max(sizes) else sizes
    y = _scale(reach, _BOTTOM, _TOP)
    parts = [
        x_axis(x, top=_TOP, bottom=_BOTTOM, words=format_seconds),
        y_axis(y, left=_LEFT, right=WIDTH - 4, words=format_bytes),
    ]
    if capacity in reach:
        parts.append(f'<path class="limit" d="M{_LEFT:.1f},{y(capacity):.1f}H{WIDTH - 4:.1f}"/>')
        parts.append(label(_RIGHT, y(capacity) - 5, f"capacity {format_bytes(capacity)}", "bad", "end"))
    front = pareto_front([point for _, _, point in timed])
    steps = [timed[index][2] for index in front]
    path = f"M{x(steps[0][0]):.1f},{y(steps[0][1]):.1f}" + "".join(
        f"H{x(time):.1f}V{y(size):.1f}" for time, size in steps[1:]
    )
    parts.append(f'<path class="front" d="{path}"/>')
    parts.extend(_points([(n, name, (x(p[0]), y(p[1])), p) for n, name, p in timed]))
    for number, one in misfits:
        place = (_MISFITS, y(one.memory_bytes))
        parts.append(_mark(number, place, "misfit", f"{short(one.name)}: {format_bytes(one.memory_bytes)}"))
    if misfits:
        parts.append(label(_MISFITS, _BOTTOM + 14, "does not fit", "bad", "middle"))
    parts.append(label((_LEFT + _RIGHT) / 2, _BOTTOM + 32, "time per global batch", "soft", "middle"))
    parts.append(label(_LEFT - 60, _TOP - 10, "memory", "soft"))
    entries = [("chosen", "0: this plan"), ("alternative", "alternatives, as numbered in the table")]
    parts.append(legend([*entries, ("misfit", "does not fit")] if misfits else entries, x=_LEFT, y=_BOTTOM + 54))
    note = "line: Pareto front, where less time costs memory; memory is that of the fullest accelerator"
    parts.append(label(_LEFT, _BOTTOM + 72, note, "soft"))
    title = (
        f"Time and memory of the plan and {len(plan.alternatives)} alternatives, {len(front)} on the Pareto front"
    )
    return Chart(name="alternatives", title=title, height=_BOTTOM + 80, body="".join(parts))


def _scale(values: Sequence[float], start: float, end: float) -> Scale:
    """From 0 with some room, or logarithmic where the values are far apart."""
    low, high = min(values), max(values)
    if low > 0 and high / low > 4:
        return Scale(low=low / 1.3, high=high * 1.3, start=start, end=end, logarithmic=True)
    return Scale(low=0.0, high=high * 1.08 or 1.0, start=start, end=end)


def _points(
    points: Sequence[tuple[int, str, tuple[float, float], tuple[float, float]]],
) -> list[str]:
    """The alternatives, then the plan on top; a label that would cover another is left out."""
    parts = []
    for number, name, place, (time, size) in reversed(points):
        title = f"{number}: {short(name)}, {format_seconds(time)}, {format_bytes(size)}"
        parts.append(_mark(number, place, "chosen" if number == 0 else "alternative", title, named=False))
    written: list[tuple[float, float]] = []
    for number, _, (x, y), _ in points:
        if all(abs(x - a) > 14 or abs(y - b) > 11 for a, b in written):
            classes = ("strong",) if number == 0 else ()
            parts.append(label(x + 8, y - 5, str(number), *classes))
            written.append((x, y))
    return parts


def _mark(number: int, place: tuple[float, float], classes: str, title: str, *, named: bool = True) -> str:
    x, y = place
    size = 7 if classes == "chosen" else 5
    circle = f'<circle class="{classes}" cx="{x:.1f}" cy="{y:.1f}" r="{size}">'
    shape = f"{circle}<title>{safe(title, 200)}</title></circle>"
    return shape + (label(x + 8, y + 4, str(number)) if named else "")
