"""Stage balance: what each stage takes per micro-batch, predicted and measured on the same axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bapipe.records.plan import Plan
from bapipe.reporting.charts.frame import CHARACTER, WIDTH, Chart, Scale, label, legend, rect, x_axis
from bapipe.reporting.drawing.action_styles import LOOKS
from bapipe.schedule.actions import Kind
from bapipe.simulator.timeline import Timeline
from bapipe.units import format_seconds

__all__ = ["Balance", "balance_chart", "balance_of"]

_LEFT, _ROOM = 76.0, 70.0
_KINDS = (Kind.F, Kind.R, Kind.B, Kind.I, Kind.W)


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """Seconds per micro-batch of every stage, on the share that one of its replicas runs."""

    parts: tuple[tuple[tuple[Kind, float], ...], ...]
    """of each stage, its kinds and their seconds"""

    @property
    def totals(self) -> tuple[float, ...]:
        return tuple(sum(seconds for _, seconds in stage) for stage in self.parts)

    @property
    def mean_over_slowest(self) -> float:
        """1 where all stages take equally long."""
        slowest = max(self.totals)
        return sum(self.totals) / len(self.totals) / slowest if slowest > 0 else 1.0


def balance_of(plan: Plan, timeline: Timeline) -> Balance:
    """The balance in a timeline of the plan, predicted or measured. Optimizer step and all-reduce come once per
    global batch and do not count."""
    work = np.zeros((len(plan.stages), len(Kind)))
    np.add.at(work, (timeline.stages, timeline.kinds), timeline.work)
    parts = []
    for number, stage in enumerate(plan.stages):
        each = work[number] / (plan.microbatches * len(stage.accelerators))
        parts.append(tuple((kind, float(each[kind])) for kind in _KINDS if each[kind] > 0))
    return Balance(parts=tuple(parts))


def balance_chart(predicted: Balance, *, measured: Balance | None = None) -> Chart:
    """A bar per stage, and the measured one under it."""
    both = [predicted] if measured is None else [predicted, measured]
    longest = max(max(balance.totals) for balance in both) or 1.0
    count = len(predicted.parts)
    thick = 20.0 if count <= 16 else 10.0
    pitch = thick * len(both) + (7.0 if count <= 16 else 3.0)
    top, bottom = 8.0, 8.0 + count * pitch
    x = Scale(low=0.0, high=longest, start=_LEFT, end=WIDTH - _ROOM)
    parts = [x_axis(x, top=top, bottom=bottom, words=format_seconds)]
    lines = [x(max(balance.totals)) for balance in both]
    words = []
    for number in range(count):
        y = top + number * pitch
        parts.append(label(_LEFT - 8, y + pitch / 2 + 2, f"stage {number}", "end"))
        for row, balance in enumerate(both):
            parts.append(_bar(balance, number, x, y + row * thick, thick, measured=row == 1))
            words.append(_words(balance, number, x, y + row * thick, thick, lines))
    for line, classes in zip(lines, ("limit", "cut"), strict=False):
        parts.append(f'<path class="{classes}" d="M{line:.1f},{top:.1f}V{bottom:.1f}"/>')
    parts += words
    kinds = [kind for kind in _KINDS if any(kind in dict(stage) for b in both for stage in b.parts)]
    entries = [(kind.name, f"{kind.name} {LOOKS[kind].name}") for kind in kinds]
    parts.append(legend(entries, x=_LEFT, y=bottom + 34))
    said = "dashed: the slowest stage"
    if measured is not None:
        said += "; upper bar predicted, outlined lower bar measured"
    parts.append(label(_LEFT, bottom + 52, said, "soft"))
    title = "Seconds per micro-batch of each stage: " + ", ".join(
        f"stage {number} {format_seconds(total)}" for number, total in enumerate(predicted.totals[:16])
    )
    return Chart(name="balance", title=title, height=bottom + 60, body="".join(parts))


def _bar(balance: Balance, stage: int, x: Scale, y: float, thick: float, *, measured: bool) -> str:
    parts, done = [], 0.0
    when = "measured" if measured else "predicted"
    for kind, seconds in balance.parts[stage]:
        title = f"stage {stage} {LOOKS[kind].name}, {when}: {format_seconds(seconds)} per micro-batch"
        width = x(done + seconds) - x(done)
        parts.append(rect(x(done), y, width, thick - 1, f"{kind.name} edge", title))
        done += seconds
    if measured:
        parts.append(rect(x(0), y, x(done) - x(0), thick - 1, "outline"))
    return "".join(parts)


def _words(balance: Balance, stage: int, x: Scale, y: float, thick: float, lines: Sequence[float]) -> str:
    """What is written in a bar, over any line that crosses it, and behind it, beside the lines."""
    parts, done = [], 0.0
    for kind, seconds in balance.parts[stage]:
        words = format_seconds(seconds)
        width = x(done + seconds) - x(done)
        if thick >= 16 and len(words) * CHARACTER + 6 < width:
            parts.append(rect(x(done) + 3, y + 3, len(words) * CHARACTER + 3, thick - 7, "plate-" + kind.name))
            parts.append(label(x(done) + 5, y + thick / 2 + 3, words, f"on-{kind.name}"))
        done += seconds
    if thick >= 10:
        words, place = format_seconds(done), x(done) + 5
        for line in sorted(lines):
            if place - 2 < line < place + len(words) * CHARACTER + 2:
                place = line + 5
        parts.append(label(place, y + thick / 2 + 3, words, "soft"))
    return "".join(parts)
