"""The report as a file: a page, and if asked for its pictures and a trace."""

from __future__ import annotations

from pathlib import Path

from bapipe.costs.profile import Profile
from bapipe.errors import FileFormatError
from bapipe.io.files import write_bytes, write_text
from bapipe.planner.partition.paper.step_record import Step
from bapipe.records.plan import Plan
from bapipe.records.run_record import RunRecord
from bapipe.reporting.drawing.png import to_png
from bapipe.reporting.html.document import make_subject, pictures, render_report, trace_of
from bapipe.simulator.timeline import Timeline
from bapipe.units import format_bytes

__all__ = ["write_report"]


def write_report(
    plan: Plan,
    out: str | Path,
    *,
    run: RunRecord | None = None,
    profile: Profile | None = None,
    steps: tuple[Step, ...] = (),
    predicted: Timeline | None = None,
    svg_folder: str | None = None,
    png_folder: str | None = None,
    trace_file: str | None = None,
) -> list[str]:
    """Write a plan, and a run of it, as one HTML page that works offline; what was written, a line for each file.

    A `profile` adds every layer's cost, `steps` the paper's exploration; `predicted` is the plan's
    timeline where it is at hand, else the plan is simulated. The pictures also go to `svg_folder` as
    SVG and to `png_folder` as PNG, the timelines to `trace_file` as a Perfetto trace.
    """
    lines = []
    if run is not None and not run.events:
        lines.append("the run was not traced (--no-trace): the report shows the plan alone")
        run = None
    subject = make_subject(plan, record=run, profile=profile, steps=steps, predicted=predicted)
    page = render_report(subject)
    write_text(out, page)
    lines.append(f"wrote {out}, {format_bytes(len(page.encode()))}: open it in a browser")
    drawn = {} if svg_folder is None and png_folder is None else pictures(subject)
    if svg_folder is not None:
        for name, text in drawn.items():
            write_text(_folder(svg_folder) / name, text)
            lines.append(f"wrote {Path(svg_folder) / name}")
    if png_folder is not None:
        for name, text in drawn.items():
            path = _folder(png_folder) / f"{name.removesuffix('.svg')}.png"
            write_bytes(path, to_png(text))
            lines.append(f"wrote {path}")
    if trace_file is not None:
        write_text(trace_file, trace_of(subject))
        lines.append(f"wrote {trace_file}: open it at ui.perfetto.dev")
    return lines


def _folder(name: str) -> Path:
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileFormatError(f"{name} cannot be made: {error}; name another folder") from None
    return Path(name)
