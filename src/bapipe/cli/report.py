"""`bapipe report`: a plan, and a run of it, as one page to look at, keep and send."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from bapipe.costs.profile import Profile
    from bapipe.planner.partition.paper.step_record import Step
    from bapipe.records.plan import Plan

__all__ = ["report_command"]


@click.command("report")
@click.argument("plan_file", type=click.Path(dir_okay=False))
@click.argument("run_file", type=click.Path(dir_okay=False), required=False)
@click.option(
    "-o", "--out", type=click.Path(dir_okay=False), default="report.html", show_default=True, help="The page."
)
@click.option(
    "--profile", "model", help="What was planned: profile.json, or the model's name. Shows every layer's cost."
)
@click.option(
    "--beside",
    "other_file",
    type=click.Path(dir_okay=False),
    metavar="PLAN_FILE",
    help="Another plan of the same model: write both side by side, with a time cursor that plays.",
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
    other_file: str | None,
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
      bapipe report plan.json --beside other.json -o both.html
    """
    if other_file is not None:
        others = (run_file, model, svg_folder, png_folder, trace_file, explain or None)
        _side_by_side(plan_file, other_file, out, alone=not any(others))
        return
    from bapipe.records.plan import read_plan
    from bapipe.records.run_record import read_run
    from bapipe.reporting.html.write_report import write_report

    plan = read_plan(plan_file)
    record = None if run_file is None else read_run(run_file)
    profile = _profile(plan, model)
    steps = _steps(plan, profile) if explain else ()
    written = write_report(
        plan,
        out,
        run=record,
        profile=profile,
        steps=steps,
        svg_folder=svg_folder,
        png_folder=png_folder,
        trace_file=trace_file,
    )
    for line in written:
        click.echo(line)


def _side_by_side(plan_file: str, other_file: str, out: str, *, alone: bool) -> None:
    from bapipe.errors import BaPipeError
    from bapipe.io.files import write_text
    from bapipe.records.plan import read_plan
    from bapipe.reporting.html.side_by_side import render_side_by_side
    from bapipe.units import format_bytes

    if not alone:
        raise BaPipeError("--beside shows two plans and nothing else; give no run, and no option but --out")
    page = render_side_by_side([read_plan(plan_file), read_plan(other_file)])
    write_text(out, page)
    click.echo(f"wrote {out}, {format_bytes(len(page.encode()))}: open it in a browser")


def _profile(plan: Plan, model: str | None) -> Profile | None:
    """The profile that was named, or of a built-in model the one that was planned with, computed again.

    A profile found without being named is used only if it is the plan's own to the last bit.
    """
    from bapipe.costs.profile_ways import of_way
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
            profile = load_profile(wanted, types=types, precision=plan.dtype, microbatches=sizes, args=args)
        except BaPipeError:
            if model is None:
                return None
            raise
        if profile.hash == plan.profile_hash:
            return profile
    return of_way(profile, compiled=plan.compiled) if model is not None else None


def _steps(plan: Plan, profile: Profile | None) -> tuple[Step, ...]:
    from bapipe.errors import BaPipeError
    from bapipe.planner import Request, explore

    if profile is None:
        raise BaPipeError("--explain explores again and needs what was planned; give --profile profile.json")
    request = Request(strategy="bapipe", global_batch=plan.global_batch, optimizer=plan.optimizer)
    found = explore(profile, plan.cluster, request)
    return next((each.candidate.steps for each in found.considered if each.candidate.steps), ())
