"""`bapipe report`: a plan, and a run of it, as one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

from bapipe.analysis.predicted_measured import compare
from bapipe.costs.profile import Profile
from bapipe.errors import BaPipeError
from bapipe.planner.partition.paper.step_record import Step
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.records.plan import Plan
from bapipe.records.run_record import RunRecord
from bapipe.reporting.charts.frame import DARK, LIGHT, chart_style, safe
from bapipe.reporting.drawing.action_styles import LOOKS
from bapipe.reporting.drawing.patterns import patterns
from bapipe.reporting.drawing.timeline_svg import render_svg
from bapipe.reporting.html.page_data import page_data, script_json
from bapipe.reporting.html.sections import Subject, charts_of, sections_html
from bapipe.reporting.trace import trace_json
from bapipe.reporting.views.layer_view import layer_view, require_profile_of
from bapipe.reporting.views.memory_view import memory_view
from bapipe.simulator.timeline import Timeline

__all__ = [
    "fill_page",
    "fill_template",
    "make_subject",
    "page_asset",
    "page_script",
    "page_style",
    "pictures",
    "render_report",
    "timelines_of",
    "trace_of",
]

_MOST_ACTIONS = 1_000_000
"""what a page can hold"""
_SCRIPTS = ("data", "values", "picture", "view", "page")
"""each uses names of those before it"""


def make_subject(
    plan: Plan,
    *,
    record: RunRecord | None = None,
    profile: Profile | None = None,
    steps: tuple[Step, ...] = (),
    predicted: Timeline | None = None,
) -> Subject:
    """Work out what a report shows: simulates the plan unless it is `predicted`, and sets the run against it.

    The run must be of this plan and the profile the one that it was planned with; another is refused.
    """
    if profile is not None:
        require_profile_of(plan, profile)
    comparison = None if record is None else compare(plan, record)
    if comparison is not None:
        predicted = comparison.predicted
    elif predicted is None:
        actions = plan.schedule.copies * sum(len(lane.actions) for lane in plan.schedule.lanes)
        if actions > _MOST_ACTIONS:
            raise BaPipeError(
                f"a report draws every action, at most {_MOST_ACTIONS}, and the plan of {len(plan.ranks)} "
                f"accelerators has {actions}; report a plan of fewer"
            )
        predicted = plan_timeline(plan)
    return Subject(
        plan=plan,
        predicted=predicted,
        memory=memory_view(plan, predicted),
        layers=None if profile is None else layer_view(plan, profile),
        steps=steps,
        comparison=comparison,
    )


def timelines_of(subject: Subject) -> dict[str, Timeline]:
    """What was predicted, and what was measured if anything was."""
    timelines = {"predicted": subject.predicted}
    if subject.comparison is not None:
        timelines["measured"] = subject.comparison.measured
    return timelines


_MOUNT = 'bapipe.mount(document, JSON.parse(document.getElementById("bapipe-data").textContent));'


def render_report(subject: Subject) -> str:
    """The page. It asks for nothing from elsewhere, and its policy forbids that it could."""
    return fill_page(
        title=safe(f"{subject.plan.model.name[:80]}: BaPipe report", 100),
        style=page_style(),
        sections=sections_html(subject),
        data=page_data(timelines_of(subject)),
        script=f"{page_script()}\n{_MOUNT}",
    )


def fill_page(*, title: str, style: str, sections: str, data: object, script: str) -> str:
    """A page of its own, with all that it needs; `title` is safe, `script` reads the data from `#bapipe-data`."""
    values = {
        "title": title,
        "style": style,
        "patterns": "".join(patterns(LOOKS)),
        "sections": sections,
        "data": script_json(data),
        "script": script,
    }
    return fill_template(page_asset("page.html"), values)


def page_style() -> str:
    """The style sheet of the sections and their charts, in light and dark."""
    return f"{_theme()}\n{page_asset('page.css')}\n{chart_style({name: f'var(--{name})' for name in LIGHT})}"


def page_script() -> str:
    """What draws timelines: `bapipe.mount(document, data)` with the data of `page_data`. The one name it takes."""
    parts = "\n".join(page_asset(f"{name}.js") for name in _SCRIPTS)
    return f'"use strict";\nconst bapipe = (() => {{\n{parts}\nreturn api;\n}})();\n'


def fill_template(template: str, values: Mapping[str, str]) -> str:
    """The template with each {{name}} replaced, in one pass: what is put in is not looked at again."""
    pieces = template.split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        filled += [values[name], rest]
    return "".join(filled)


def pictures(subject: Subject) -> dict[str, str]:
    """The same pictures as SVG files, by name."""
    name = subject.plan.model.name[:80]
    found = {chart.name: chart.standalone() for chart in charts_of(subject)}
    for when, timeline in timelines_of(subject).items():
        found["timeline" if when == "predicted" else f"timeline-{when}"] = render_svg(
            timeline, title=f"{name}, {when}", unit="s"
        )
    return {f"{name}.svg": text for name, text in found.items()}


def trace_of(subject: Subject) -> str:
    """Predicted and measured together, for Perfetto."""
    return trace_json(timelines_of(subject))


def page_asset(name: str) -> str:
    """The text of a file beside the template."""
    return files("bapipe.reporting.html").joinpath("page", name).read_text(encoding="utf-8")


def _theme() -> str:
    """The page's colours: the system's choice, unless the reader or the printer chose."""

    def names(colours: dict[str, str]) -> str:
        return "".join(f"--{name}:{value};" for name, value in colours.items())

    return (
        f":root{{{names(LIGHT)}color-scheme:light}}"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{names(DARK)}color-scheme:dark}}}}"
        f":root[data-theme=dark]{{{names(DARK)}color-scheme:dark}}"
        f"@media print{{:root{{{names(LIGHT)}color-scheme:light}}}}"
    )
