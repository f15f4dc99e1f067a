"""What a notebook shows of a plan and a timeline: HTML that needs nothing else."""

from __future__ import annotations

from bapipe.planner.plan_timeline import plan_timeline
from bapipe.records.plan import Plan
from bapipe.reporting.charts.alternatives import alternatives_chart
from bapipe.reporting.charts.balance import balance_chart, balance_of
from bapipe.reporting.charts.frame import safe
from bapipe.reporting.drawing.timeline_svg import render_svg
from bapipe.reporting.html.head_section import why_not_the_others
from bapipe.reporting.terminal.plan_table import answer
from bapipe.simulator.timeline import Timeline

__all__ = ["plan_html", "timeline_html"]

_MOST_RECTS = 4_000
"""beyond so many actions a timeline is drawn as shares, so that a notebook stays small"""


def timeline_html(timeline: Timeline) -> str:
    """The timeline's drawing; times are in whatever unit it was made with."""
    return render_svg(timeline, width=960, max_rects=_MOST_RECTS)


def plan_html(plan: Plan) -> str:
    """The answer, the timeline, the stages' balance and the alternatives."""
    timeline = plan_timeline(plan)
    pictures = [
        render_svg(timeline, width=960, unit="s", max_rects=_MOST_RECTS),
        balance_chart(balance_of(plan, timeline)).standalone(),
        alternatives_chart(plan).standalone(),
    ]
    name = f"{plan.model.name}: "
    sentence = f"{safe(plan.model.name, 80)}: {safe(answer(plan).removeprefix(name), 400)}"
    words = f"<p><strong>{sentence}.</strong> {safe(why_not_the_others(plan), 500)}</p>"
    return words + "".join(f"<div>{picture}</div>" for picture in pictures)
