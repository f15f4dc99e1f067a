"""`bapipe report`: a plan, and a run of it, as one page to look at, keep and send."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from bapipe.costs.profile import Profile
    from bapipe.planner.partition.paper.step_record import Step
    from bapipe.records.plan import Plan
    from bapipe.records.run_record import RunRecord

__all__ = ["report_command", "write_report"]


@click.command("report")
@click.argument("plan_file", type=click.Path(dir_okay=False))
@click.argument("run_file", type=click.Path(dir_okay=False), required=False)
@click.option(
    "-o", "--out", type=click.Path(dir_okay=False), default="report.html", show_default=True, help="The page."
)
@click.option(
    "--profile", "model", help="What was planned: profile.json, or the model's name. Shows every layer's cost."
)
@click.option("--explain", is_flag=True, help="Show the paper's exploration step by step; needs the profile.")
@click.option("--svg", "svg_folder", type=click.Path(file_okay=False), help="Write the pictures as SVG there.")
@click.option(
    "--png",
    "png_folder",
    type=click.Path(file_okay=False),
    help="Write them as PNG there; needs resvg-py.",
)
@click.option(
    "--trace", "trace_file", type=click.Path(dir_okay=False), help="Write the timelines as one Perfetto trace."
)
def report_command(
    plan_file: str,
    run_file: str | None,
    out: str,
    model: str | None,
    explain: bool,
    svg_folder: str | None,
    png_folder: str | None,
    trace_file: str | None,
) -> None:
    """Write PLAN_FILE as one HTML page that works offline, with RUN_FILE beside it if given.

    \b
    Examples:
      bapipe report plan.json -o report.html
      bapipe report plan.json run.json --profile profile.json --svg pictures --trace both.json
    """
    from bapipe.records.plan import read_plan
    from bapipe.records.run_record import read_run

    plan = read_plan(plan_file)
    record = None if run_file is None else read_run(run_file)
    profile = _profile(plan, model)
    steps = _steps(plan, profile) if explain else ()
    written = write_report(
        plan,
        out,
        record=record,
        profile=profile,
        steps=steps,
        svg_folder=svg_folder,
        png_folder=png_folder,
        trace_file=trace_file,
    )
    for line in written:
        click.echo(line)


def write_report(
    plan: Plan,
    out: str,
    *,
    record: RunRecord | None = None,
    profile: Profile | None = None,
    steps: tuple[Step, ...] = (),
    svg_folder: str | None = None,
    png_folder: str | None = None,
    trace_file: str | None = None,
) -> list[str]:
    """Write the page and what else was asked for; a line for each."""
    from bapipe.io.files import write_bytes, write_text
    from bapipe.reporting.drawing.png import to_png
    from bapipe.reporting.html.document import make_subject, pictures, render_report, trace_of
    from bapipe.units import format_bytes

    subject = make_subject(plan, record=record, profile=profile, steps=steps)
    page = render_report(subject)
    write_text(out, page)
    lines = [f"wrote {out}, {format_bytes(len(page.encode()))}: open it in a browser"]
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
    from bapipe.errors import FileFormatError

    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileFormatError(f"{name} cannot be made: {error}; name another folder") from None
    return Path(name)


def _profile(plan: Plan, model: str | None) -> Profile | None:
    """The profile that was named, or of a built-in model the one that was planned with, computed again.

    A profile found without being named is used only if it is the plan's own to the last bit.
    """
    from bapipe.costs.resolve_model import load_profile
    from bapipe.errors import BaPipeError
    from bapipe.models.builtin import is_builtin

    wanted = plan.model.name if model is None else model
    if model is None and not is_builtin(wanted):
        return None
    names = dict.fromkeys(accelerator.type for accelerator in plan.cluster.accelerators)
    types = [plan.cluster.types[name] for name in names]
    common = [2**exponent for exponent in range(8)]
    for sizes in (common, sorted({*common, plan.microbatch_size})):
        try:
            args = plan.model.args if is_builtin(wanted) else None
            profile = load_profile(wanted, types=types, dtype=plan.dtype, microbatches=sizes, args=args)
        except BaPipeError:
            if model is None:
                return None
            raise
        if profile.hash == plan.profile_hash:
            return profile
    return profile if model is not None else None


def _steps(plan: Plan, profile: Profile | None) -> tuple[Step, ...]:
    from typing import cast

    from bapipe.errors import BaPipeError
    from bapipe.planner import Request, explore
    from bapipe.planner.evaluate import Optimizer

    if profile is None:
        raise BaPipeError("--explain explores again and needs what was planned; give --profile profile.json")
    request = Request(strategy="bapipe", minibatch=plan.minibatch, optimizer=cast(Optimizer, plan.optimizer))
    found = explore(profile, plan.cluster, request)
    return next((each.candidate.steps for each in found.considered if each.candidate.steps), ())
