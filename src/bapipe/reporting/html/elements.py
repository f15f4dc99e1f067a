"""Pieces of HTML that the report's sections are made of.

Every figure stands in a <data> element whose value is the exact number; its text is that number for people.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bapipe.records.plan import Alternative, Prediction
from bapipe.reporting.charts.frame import Chart, safe
from bapipe.units import format_bytes, format_seconds, format_seconds_range

__all__ = ["counted", "figure", "picture", "seconds", "section", "share", "size", "table", "time_range"]


def figure(value: float, words: str) -> str:
    """A figure: the words that people read, and the exact value."""
    return f'<data value="{value!r}">{safe(words, 200)}</data>'


def seconds(value: float) -> str:
    return figure(value, format_seconds(value))


def time_range(about: Prediction | Alternative) -> str:
    """A time, and the range in which it lies where that is known; – where there is none."""
    if about.time is None:
        return "–"
    if about.low is None or about.high is None:
        return seconds(about.time)
    words = format_seconds_range(about.time, about.low, about.high).strip("()").split("–")
    ends = (figure(end, word) for end, word in zip((about.low, about.high), words, strict=True))
    return f"{seconds(about.time)} ({'–'.join(ends)})"


def size(value: float) -> str:
    """Bytes."""
    return figure(value, format_bytes(value))


def share(value: float) -> str:
    return figure(value, f"{value:.1%}")


def counted(count: int, noun: str) -> str:
    """1 alternative, 2 alternatives."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def table(name: str, headers: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1) -> str:
    """A table that scrolls by itself where it is too wide; its cells are HTML, the first `words` columns text."""

    def cells(row: Sequence[str]) -> str:
        first = f'<th scope="row">{row[0]}</th>'
        rest = (
            f"<td>{cell}</td>" if place < words else f'<td class="number">{cell}</td>'
            for place, cell in enumerate(row[1:], start=1)
        )
        return f"<tr>{first}{''.join(rest)}</tr>"

    head = "".join(
        f'<th scope="col"{"" if place < words else " class=number"}>{header}</th>'
        for place, header in enumerate(headers)
    )
    body = "".join(cells(row) for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{safe(name)} table"><table id="{name}-table">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def picture(chart: Chart) -> str:
    """A chart that scrolls by itself where the page is narrower than its words can be read."""
    return (
        f'<div class="scroll picture" tabindex="0" role="region" aria-label="{chart.name} picture">'
        f"{chart.inline()}</div>"
    )


def section(name: str, title: str, *parts: str) -> str:
    head = f'<h2 id="{name}-title">{title}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">{head}{"".join(parts)}</section>'
