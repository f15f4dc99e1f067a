"""`bapipe compare`: see how true a plan's prediction was, and correct the profile by the run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from bapipe.cli.values import plain_number
from bapipe.errors import BaPipeError
from bapipe.io.files import content_hash, plain_values, write_text

if TYPE_CHECKING:
    from bapipe.analysis.predicted_measured import Comparison
    from bapipe.analysis.recalibrate import Recalibration
    from bapipe.hardware.cluster import Cluster
    from bapipe.records.plan import Plan

__all__ = ["compare_command"]


@click.command("compare")
@click.argument("plan_file", type=click.Path(dir_okay=False))
@click.argument("files", nargs=-1, metavar="[RUN_FILE]", type=click.Path(dir_okay=False))
@click.option("--engines", is_flag=True, help="Run every plan given by each engine, side by side, and time both.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="With --engines: instead of what the plan has.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--trace", "trace_file", type=click.Path(dir_okay=False), help="Write both timelines as one Perfetto trace."
)
@click.option(
    "--profile", "profile_file", type=click.Path(dir_okay=False), help="What was planned with, for --recalibrate."
)
@click.option(
    "--recalibrate",
    "corrected_file",
    type=click.Path(dir_okay=False),
    help="Write the profile with its layers' times scaled to what the run measured.",
)
@click.option(
    "--cluster-out",
    "cluster_file",
    type=click.Path(dir_okay=False),
    help="Write the plan's cluster (TOML) with its links as the run's transfers took them.",
)
def compare_command(
    plan_file: str,
    files: tuple[str, ...],
    engines: bool,
    device: str | None,
    as_json: bool,
    trace_file: str | None,
    profile_file: str | None,
    corrected_file: str | None,
    cluster_file: str | None,
) -> None:
    """Show what PLAN_FILE predicted beside what RUN_FILE measured, per stage and rank.

    \b
    Examples:
      bapipe compare plan.json run.json
      bapipe compare plan.json run.json --profile profile.json --recalibrate corrected.json
      bapipe plan corrected.json --cluster cluster.toml
      bapipe compare --engines plan.json other-plan.json
    """
    if engines:
        if any((trace_file, profile_file, corrected_file, cluster_file)):
            raise BaPipeError("--engines runs plans and compares times; leave the options about a run out")
        _compare_engines((plan_file, *files), device, as_json=as_json)
        return
    if device is not None:
        raise BaPipeError("--device says where --engines runs plans; give that too, or leave it out")
    if len(files) != 1:
        raise BaPipeError(
            f"a plan is compared with one run, got {len(files)}; give PLAN_FILE RUN_FILE, or --engines and plans"
        )
    run_file = files[0]
    from bapipe.analysis.predicted_measured import compare, comparison_values
    from bapipe.analysis.recalibrate import recalibrate
    from bapipe.costs.profile import read_profile, write_profile
    from bapipe.costs.profile_ways import of_way
    from bapipe.records.plan import read_plan
    from bapipe.records.run_record import read_run

    if (profile_file is None) != (corrected_file is None):
        given, lacking = ("--recalibrate", "--profile") if profile_file is None else ("--profile", "--recalibrate")
        raise BaPipeError(f"{given} needs {lacking}, too: the profile that was planned with, and what to write")
    if cluster_file is not None and not cluster_file.lower().endswith(".toml"):
        raise BaPipeError(f"a cluster file is TOML, got --cluster-out {cluster_file[:200]}; end it in .toml")
    plan, record = read_plan(plan_file), read_run(run_file)
    found = compare(plan, record)
    cluster = None
    if cluster_file is not None:
        cluster = _corrected_cluster(found, plan, cluster_file, run=content_hash(record))
    again = None
    if profile_file is not None and corrected_file is not None:
        again = recalibrate(plan, record, of_way(read_profile(profile_file), compiled=plan.compiled))
        write_profile(again.profile, corrected_file)
    if trace_file:
        from bapipe.reporting.trace import trace_json

        write_text(trace_file, trace_json({"predicted": found.predicted, "measured": found.measured}))
    if as_json:
        values = comparison_values(found)
        if again is not None:
            values["recalibration"] = {
                "corrections": plain_values(again.corrections),
                "notes": again.notes,
                "predicted_time": _time_again(plan, again, cluster, found),
            }
        click.echo(json.dumps(plain_number(values), indent=1, allow_nan=False))
        return
    _print(found)
    if again is not None:
        _print_corrections(plan, again, cluster, found)
    for path in (corrected_file, cluster_file, trace_file):
        if path:
            click.echo(f"wrote {path}")


def _compare_engines(plans: tuple[str, ...], device: str | None, *, as_json: bool) -> None:
    """Run each plan by each engine; a line for what an engine cannot run."""
    from bapipe.reporting.terminal.console import terminal
    from bapipe.reporting.terminal.engine_times_table import engine_times_table
    from bapipe.torch.launch.run_options import RunOptions
    from bapipe.torch.trials.engine_trials import engine_times, largest_loss_difference

    options = RunOptions(device=device, trace=False)
    found = [engine_times(plan, options) for plan in plans]
    if as_json:
        click.echo(json.dumps(plain_number([plain_values(item) for times in found for item in times]), indent=1))
        return
    console = terminal()
    console.print(
        engine_times_table(
            [(item.plan, item.engine, item.seconds, item.throughput) for times in found for item in times]
        )
    )
    for times in found:
        for item in times:
            if item.reason is not None:
                console.print(f"{item.plan}, {item.engine}: {item.reason}")
        difference = largest_loss_difference(times)
        if difference is not None:
            console.print(f"{times[0].plan}: losses of both engines differ by at most {difference:.1e}")


def _corrected_cluster(found: Comparison, plan: Plan, path: str, *, run: str) -> Cluster:
    from bapipe.analysis.link_estimate import correct_links
    from bapipe.hardware.cluster_toml import cluster_toml

    cluster = correct_links(plan.cluster, found.links)
    changed = ", ".join(estimate.link for estimate in found.links if estimate.corrected is not None)
    write_text(path, cluster_toml(cluster, comment=f"links corrected by run {run}: {changed}"))
    return cluster


def _time_again(plan: Plan, again: Recalibration, cluster: Cluster | None, found: Comparison) -> float:
    """What the corrected figures predict of a step of the plan that ran."""
    from bapipe.analysis.recalibrate import predict_again
    from bapipe.planner.plan_timeline import plan_timeline

    return plan_timeline(predict_again(plan, again.profile, cluster)).time + found.overhead.predicted


def _print(found: Comparison) -> None:
    from bapipe.reporting.terminal.compare_table import comparison_notes, comparison_tables
    from bapipe.reporting.terminal.console import terminal
    from bapipe.reporting.terminal.timeline_text import render_text

    console = terminal()
    width, color = max(40, console.width), console.is_terminal
    timelines: dict[str, Any] = {"predicted": found.predicted, "measured": found.measured}
    for title, timeline in timelines.items():
        console.print(render_text(timeline, width=width, color=color, unit="s", title=title))
    for table in comparison_tables(found):
        console.print(table)
    for note in comparison_notes(found):
        console.print(note)


def _print_corrections(plan: Plan, again: Recalibration, cluster: Cluster | None, found: Comparison) -> None:
    from bapipe.reporting.terminal.compare_table import correction_table
    from bapipe.reporting.terminal.console import terminal
    from bapipe.units import format_seconds

    console = terminal()
    console.print(correction_table(again))
    for note in again.notes:
        console.print(note)
    corrected = "times" if cluster is None else "times and links"
    time, measured = format_seconds(_time_again(plan, again, cluster, found)), format_seconds(found.step.measured)
    console.print(f"with the corrected {corrected} a step of this plan is predicted at {time}; it took {measured}")
