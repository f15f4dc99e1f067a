"""Two plans on one page: their figures, timelines on one axis under a time cursor that plays, and their memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bapipe.errors import BaPipeError
from bapipe.records.plan import Plan
from bapipe.reporting.charts.frame import safe
from bapipe.reporting.charts.rank_memory import memory_chart
from bapipe.reporting.html.document import fill_page, make_subject, page_asset, page_script, page_style
from bapipe.reporting.html.elements import figure, picture, seconds, section, share, size, table
from bapipe.reporting.html.page_data import page_data
from bapipe.reporting.html.sections import Subject, timeline_section
from bapipe.reporting.terminal.plan_table import shape
from bapipe.reporting.views.memory_view import MemoryView
from bapipe.units import format_throughput

__all__ = ["NAMES", "memory_curve", "render_side_by_side"]

NAMES = ("A", "B")


def render_side_by_side(plans: Sequence[Plan]) -> str:
    """The page of two plans of one model. It asks for nothing from elsewhere.

    Refuses plans of two models, whose times say nothing about each other.
    """
    if len(plans) != 2:
        raise BaPipeError(f"two plans stand side by side, got {len(plans)}; give one beside the other")
    first, second = (plan.model.name for plan in plans)
    if first != second:
        raise BaPipeError(
            f"one plan is of {first[:60]} and the other of {second[:60]}; compare two plans of one model"
        )
    subjects = [make_subject(plan) for plan in plans]
    timelines = {name: subject.predicted for name, subject in zip(NAMES, subjects, strict=True)}
    data = {
        **page_data(timelines),
        "grouped": True,
        "memory": [memory_curve(subject.memory) for subject in subjects],
        "samples": [plan.global_batch for plan in plans],
    }
    microbatches = max(plan.microbatches for plan in plans)
    sections = [
        _head(plans),
        timeline_section(microbatches, choices=_CHOICES, more=_PLAYER),
        section("memory", "Memory over time", _memory(subjects)),
    ]
    return fill_page(
        title=safe(f"{first[:80]}: two plans side by side", 120),
        style=f"{page_style()}\n{page_asset('side_by_side.css')}",
        sections="\n".join(sections),
        data=data,
        script=f"{page_script()}\n{page_asset('player.js')}\n{_START}",
    )


_START = """const data = JSON.parse(document.getElementById("bapipe-data").textContent);
const player = new Player(document, bapipe.mount(document, data), data);"""
_CHOICES = (("both", "A and B"), *((name, name) for name in NAMES))
_PLAYER = (
    '<div class="player" id="player"><button type="button" id="play" aria-pressed="false">Play</button>'
    '<label class="scrub">time <input id="scrub" type="range" min="0" max="1000" value="0" step="1"></label>'
    '<ul id="now" aria-live="off"></ul></div>'
)


def memory_curve(view: MemoryView) -> dict[str, list[float]]:
    """`times` in seconds, and from each on the `bytes` of the rank that is then the fullest."""
    times = np.unique(np.concatenate([np.zeros(1), *(rank.times for rank in view.ranks)]))
    fullest = np.zeros(len(times))
    for rank in view.ranks:
        place = np.searchsorted(rank.times, times, side="right") - 1
        held = np.where(place >= 0, rank.activations[np.maximum(place, 0)], 0.0)
        fullest = np.maximum(fullest, held + sum(rank.beside_activations().values()))
    return {"times": times.tolist(), "bytes": fullest.tolist()}


def _head(plans: Sequence[Plan]) -> str:
    rates = [plan.prediction.throughput for plan in plans]
    faster = NAMES[int(rates[1] > rates[0])]
    ratio = max(rates) / min(rates)
    batches = {plan.global_batch for plan in plans}
    answer = f"{faster} is {ratio:.2f} times as fast" if ratio >= 1.005 else "Both are as fast"
    note = "" if len(batches) == 1 else " The global batches differ: compare samples/s, not times."
    rows = [
        ("plan", *(safe(shape(plan), 200) for plan in plans)),
        ("global batch", *(figure(plan.global_batch, f"{plan.global_batch}") for plan in plans)),
        ("samples/s", *(figure(rate, format_throughput(rate)) for rate in rates)),
        ("time per global batch", *(seconds(plan.prediction.time) for plan in plans)),
        ("bubble", *(share(plan.prediction.bubble) for plan in plans)),
        ("over the lower bound", *(share(plan.prediction.gap) for plan in plans)),
        ("memory, fullest accelerator", *(size(max(s.memory_bytes for s in plan.stages)) for plan in plans)),
        ("cluster", *(safe(plan.cluster.name, 80) for plan in plans)),
    ]
    return (
        f'<header><h1>{safe(plans[0].model.name, 80)}: A and B</h1><p class="answer" id="answer">{answer}, as '
        f"predicted.{note}</p></header>" + section("figures", "Figures", table("figures", ("", *NAMES), rows))
    )


def _memory(subjects: Sequence[Subject]) -> str:
    panels = (
        f"<div><h3>{name}</h3>{picture(memory_chart(subject.memory, time=subject.predicted.makespan))}</div>"
        for name, subject in zip(NAMES, subjects, strict=True)
    )
    return f'<div class="pair">{"".join(panels)}</div>'
