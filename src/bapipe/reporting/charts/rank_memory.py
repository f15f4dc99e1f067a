"""Memory of every rank during the global batch against what its accelerator has: one small picture each."""

from __future__ import annotations

import numpy as np

from bapipe.reporting.charts.frame import WIDTH, Chart, Scale, label, legend, rect, safe
from bapipe.reporting.views.memory_view import MemoryView, RankMemory
from bapipe.units import format_bytes

__all__ = ["MOST_RANKS", "memory_chart"]

MOST_RANKS = 64
"""ranks that are drawn; of more, the fullest"""
_POINTS = 160
"""steps in time of one picture; each shows the most of its stretch"""
_GAP, _TOP = 14.0, 18.0
_CONSTANT = ("weights", "gradients", "optimizer", "buffers")


def memory_chart(view: MemoryView, *, time: float) -> Chart:
    """Stacked bytes from the global batch's start to `time`, on one scale for all ranks."""
    by_need = sorted(view.ranks, key=lambda rank: -rank.peak)
    ranks = sorted(by_need[:MOST_RANKS], key=lambda rank: rank.rank)
    columns = min(len(ranks), 2 if len(ranks) <= 4 else 4)
    width = (WIDTH - _GAP * (columns - 1)) / columns
    height = 110.0 if columns <= 2 else 74.0
    highest = max(rank.peak for rank in ranks) * 1.12 or 1.0
    needed = max((rank.capacity for rank in ranks if rank.capacity <= 2.2 * highest), default=0.0)
    highest = max(highest, needed * 1.06)
    parts = []
    for place, rank in enumerate(ranks):
        x = (place % columns) * (width + _GAP)
        y = (place // columns) * (height + _TOP + 20)
        parts.append(_panel(rank, x, y, width, height, highest, time, wide=columns <= 2))
    bottom = -(-len(ranks) // columns) * (height + _TOP + 20)
    words = "saved activations" if view.exact else "saved activations and workspace"
    entries = [
        *(
            (name, name if name != "buffers" else ("buffers and workspace" if view.exact else "receive buffers"))
            for name in _CONSTANT
            if any(rank.beside_activations()[name] > 0 for rank in ranks)
        ),
        ("features", words),
    ]
    parts.append(legend(entries, y=bottom + 12))
    notes = ["dashed: capacity"] if any(0 < rank.capacity <= highest for rank in ranks) else []
    if len(view.ranks) > len(ranks):
        notes.append(f"the {len(ranks)} fullest of {len(view.ranks)} ranks")
    if not view.exact:
        notes.append("saved activations inferred from the plan's peak; plan again to see all parts of it")
    parts.append(label(0, bottom + 30, "; ".join(notes), "soft"))
    fullest = by_need[0]
    title = (
        f"Memory over time of {len(ranks)} ranks; the fullest is rank {fullest.rank} with "
        f"{format_bytes(fullest.peak)} of {format_bytes(fullest.capacity)}"
    )
    return Chart(name="memory", title=title, height=bottom + 38, body="".join(parts))


def _panel(
    rank: RankMemory, x: float, y: float, width: float, height: float, highest: float, time: float, *, wide: bool
) -> str:
    top, bottom = y + _TOP, y + _TOP + height
    up = Scale(low=0.0, high=highest, start=bottom, end=top)
    stages = f"stage {rank.stages[0]}" if len(rank.stages) == 1 else f"{len(rank.stages)} stages"
    head = f"rank {rank.rank} · {stages}" if wide else f"rank {rank.rank}"
    share = f" ({rank.peak / rank.capacity:.1%})" if rank.capacity > 0 else ""
    said = f"{format_bytes(rank.peak)} of {format_bytes(rank.capacity)}{share}"
    parts = [
        label(x, y + 12, head, "strong"),
        label(x + width, y + 12, said if wide else f"{format_bytes(rank.peak)}{share}", "soft", "end"),
        rect(x, top, width, height, "band"),
    ]
    base = 0.0
    for name, amount in rank.beside_activations().items():
        if amount > 0:
            title = f"{name} on rank {rank.rank}: {format_bytes(amount)}"
            parts.append(rect(x, up(base + amount), width, up(base) - up(base + amount), f"{name} edge", title))
            base += amount
    if rank.peak_activations > 0:
        path = _steps(rank, x, width, time, up, base)
        title = f"saved activations on rank {rank.rank}: at most {format_bytes(rank.peak_activations)}"
        parts.append(f'<path class="features" d="{path}"><title>{safe(title, 200)}</title></path>')
    if 0 < rank.capacity <= highest:
        parts.append(f'<path class="limit" d="M{x:.1f},{up(rank.capacity):.1f}H{x + width:.1f}"/>')
    return "".join(parts)


def _steps(rank: RankMemory, x: float, width: float, time: float, up: Scale, base: float) -> str:
    """The outline of the saved activations over `base`; each step is the most of its stretch of time."""
    edges = np.linspace(0.0, max(time, float(rank.times.max(initial=0.0))), _POINTS + 1)
    level = np.zeros(_POINTS)
    # The level in force when a stretch begins, and every change within it.
    begin = np.searchsorted(rank.times, edges[:-1], side="right") - 1
    level = np.where(begin >= 0, rank.activations[begin], 0.0)
    where = np.clip(np.searchsorted(edges, rank.times, side="right") - 1, 0, _POINTS - 1)
    np.maximum.at(level, where, rank.activations)
    xs = np.linspace(x, x + width, _POINTS + 1)
    parts = [f"M{x:.1f},{up(base):.1f}"]
    previous = None
    for left, value in zip(xs[:-1].tolist(), level.tolist(), strict=True):
        if value != previous:
            parts.append(f"H{left:.1f}V{up(base + value):.1f}")
            previous = value
    return "".join([*parts, f"H{x + width:.1f}V{up(base):.1f}z"])
