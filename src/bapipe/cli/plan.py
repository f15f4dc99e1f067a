"""`bapipe plan`: from a model and a cluster to the best plan."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any, cast

import click

from bapipe.cli.completion import complete_cluster, complete_model, complete_schedule
from bapipe.cli.options import (
    PRECISION_HELP,
    CompilingCommand,
    compile_option,
    optimizer_options,
    read_optimizer,
    renamed,
)
from bapipe.cli.plan_values import flat_plan
from bapipe.cli.values import plain_number
from bapipe.costs.optimizers import OPTIMIZERS
from bapipe.costs.profile import Profile
from bapipe.errors import BaPipeError, InfeasibleError
from bapipe.hardware.cluster import Cluster
from bapipe.io.files import check_output
from bapipe.planner import STRATEGIES, Exploration, Request, explore, make_plan
from bapipe.planner.effort import EFFORTS
from bapipe.planner.inputs import FPGA_DTYPE, cluster_with, goes_on_fpgas, profile_for
from bapipe.planner.request import ENGINES
from bapipe.records.plan import Plan, write_plan
from bapipe.simulator.first_pipeline import first_copy
from bapipe.units import format_bytes, format_seconds, parse_seconds, parse_share

__all__ = ["plan_command"]


@click.command("plan", cls=CompilingCommand)
@click.argument("model", shell_complete=complete_model)
@click.option("--cluster", required=True, shell_complete=complete_cluster,
              help="TOML file, or a shorthand such as 4xv100 or 2xa100+2xv100.")  # fmt: skip
@renamed("--global-batch", "global_batch", type=int,
         help="Samples per optimizer step.  [default: 64 per accelerator]")  # fmt: skip
@renamed("--micro-batch", "microbatch", type=int, help="Micro-batch size.  [default: the best]")
@click.option(
    "--schedule",
    shell_complete=complete_schedule,
    help="1f1b-sno, 1f1b-so, 1f1b, gpipe, zb, zb-h1, zb-h2, interleaved, 1f1b-as, fbp-as, data-parallel.",
)
@renamed("--in-flight", "cap", type=int, metavar="K",
         help="In-flight micro-batches at the first stage, for schedule 1f1b.")  # fmt: skip
@click.option("--stages", type=int, help="Pipeline parallelism (PP) with this many stages, none replicated.")
@click.option("--strategy", default="exact", show_default=True, help=", ".join(STRATEGIES) + ".")
@click.option("--space", type=click.Choice(["full", "paper"]), default="full", show_default=True,
              help="paper: PP with N stages, or data parallelism without gradient accumulation.")  # fmt: skip
@click.option(
    "--optimizer",
    help=f"{', '.join(OPTIMIZERS)}, or one that was profiled.  [default: as profiled, or sgd]",
)
@optimizer_options
@renamed("--precision", show_default="a profile's own, or fp32; fp16 on FPGAs", help=PRECISION_HELP)
@click.option("--batch", type=int, help="Batch at which a graph.txt was measured.  [default: inferred, or 128]")
@click.option("--memory-limit", help="Memory to plan with on each accelerator, such as 12GB.")
@click.option("--link-bandwidth", help="Of every link, such as 1.6GB/s.")
@click.option("--layer-error", metavar="SHARE", help="Relative standard error of layers' times, such as 5%: "
              "choose what loses least by it.  [default: as the profile has it]")  # fmt: skip
@click.option("--link-error", metavar="SHARE",
              help="Of transfers, such as 30%.  [default: as the cluster has it]")  # fmt: skip
@click.option("--effort", default="normal", show_default=True, metavar="WORD|SECONDS",
              help="Search by simulation: low, normal, high, or a time such as 30s.")  # fmt: skip
@click.option("--dealing", type=click.Choice(["speed", "equal"]), default="speed", show_default=True,
              help="Replicas of several types may take micro-batches by their speed, or all as many.")  # fmt: skip
@click.option("--zero-stage", type=click.Choice(["auto", "0", "1"]), default="auto", show_default=True,
              help="1: replicas of a stage share its optimizer state (ZeRO-1); 0: each has all.")  # fmt: skip
@click.option("--recompute", default="auto", show_default=True, metavar="WORD|LAYERS", help="Activation "
              "checkpointing: auto, never, of whole stages, of layers, always (every layer), or of these layers "
              "by number, such as 0-3,7: auto|never|stages|layers|always|0-3,7.")  # fmt: skip
@click.option("--dataset-size", type=int, help="Samples per epoch: prints the epoch's time.")
@click.option("--split-layers", is_flag=True, help="Let neighbouring stages share a layer by channels.")
@compile_option("Stages run as torch.compile makes them; auto: as the profile was measured, and as is faster "
                "where it has both.", default="auto")  # fmt: skip
@click.option("--assume", multiple=True, metavar="NAME=VALUE", help="An assumption of the FPGA model, such as "
              "allocation=fluid; --explain lists them.")  # fmt: skip
@click.option("--explain", is_flag=True, help="Show the paper's exploration step by step.")
@click.option("--compare", is_flag=True, help="Compare the strategies in one table.")
@click.option("--race", "racing", type=int, metavar="N", help="Run at most N plans that lie within error of the "
              "best for a few steps on this machine; the fastest is the plan.")  # fmt: skip
@click.option("--out", type=click.Path(dir_okay=False), help="Write plan.json.")
@click.option("--report", type=click.Path(dir_okay=False), help="Write the plan as an HTML page.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan_command(model: str, **options: Any) -> None:
    """Find the fastest way to train MODEL on a cluster, and show why.

    MODEL is a built-in name (vgg16, resnet50, gnmt-8, bert-large, gpt2-xl, llama-7b, …), a profile.json, a layer
    table (.toml) or PipeDream's graph.txt.

    \b
    Examples:
      bapipe plan vgg16 --cluster 4xv100 --global-batch 2048
      bapipe plan gnmt-8 --cluster 4xv100 --link-bandwidth 1.6GB/s --space paper --explain --strategy bapipe
      bapipe plan bert-large --cluster cluster.toml --optimizer adam --precision bf16-mixed --out plan.json
      bapipe plan resnet50 --cluster 2xvcu129+2xvcu118 --global-batch 128 --precision fp16
    """
    options["optimizer"] = read_optimizer(options)
    check_output(options["out"])
    check_output(options["report"])
    cluster = cluster_with(
        options["cluster"], memory_limit=options["memory_limit"], link_bandwidth=options["link_bandwidth"]
    )
    if goes_on_fpgas(model, cluster):
        if options["batch"] is not None:
            raise BaPipeError("--batch is for a graph.txt, which FPGAs do not take; leave it out")
        from bapipe.cli.fpga import plan_on_fpgas

        plan_on_fpgas(model, cluster, _request(options), {**options, "dtype": options["precision"] or FPGA_DTYPE})
        return
    if options["assume"]:
        raise BaPipeError("--assume is for FPGA clusters and models without a profile; leave it out")
    profile = profile_for(
        model,
        cluster,
        microbatch=options["microbatch"],
        precision=options["precision"],
        batch=options["batch"],
    )
    request = _request(options)
    if options["compare"]:
        if options["report"]:
            raise BaPipeError("--compare shows several plans, --report one; leave one of them out")
        _compare(profile, cluster, request, options)
        return
    explain = bool(options["report"]) or (options["explain"] and not options["as_json"])
    with _shown_progress(request) as progress:
        found = explore(profile, cluster, request, explain=explain, progress=progress)
    plan = make_plan(found) if not options["racing"] else _raced(found, options)
    if options["out"]:
        write_plan(plan, options["out"])
    if options["report"]:
        from bapipe.reporting.html.write_report import write_report

        options["written"] = write_report(
            plan,
            options["report"],
            profile=found.profile,
            steps=found.paper_steps,
            predicted=found.best.timeline if found.best.candidate.copies == 1 else None,
        )
    if options["as_json"]:
        click.echo(json.dumps(_summary(plan, found, options), indent=1, allow_nan=False))
    else:
        _print(plan, found, options)


@contextlib.contextmanager
def _shown_progress(request: Request) -> Iterator[Callable[[str, float], None] | None]:
    """A bar where more than the usual effort is asked for."""
    if request.effort in ("low", "normal"):
        yield None
        return
    from bapipe.cli.progress import progress_bar

    with progress_bar("planning") as report:
        yield report


def _raced(found: Exploration, options: dict[str, Any]) -> Plan:
    """The fastest of the plans that may be, as they ran on this machine."""
    if found.profile.model.ref is None:
        raise BaPipeError("--race runs the model, and this profile names no code for it; profile the model first")
    from pathlib import Path

    from bapipe.cli.auto import print_race
    from bapipe.torch.launch.run_options import RunOptions
    from bapipe.torch.trials.plan_race import race_found, with_measured_time

    result = race_found(found, RunOptions(), limit=options["racing"], code=Path.cwd())
    if result is None:
        if not options["as_json"]:
            click.echo("nothing to race: no other plan lies within the known error of the best")
        return make_plan(found)
    if not options["as_json"]:
        print_race(result)
    return with_measured_time(result.best, _profile_of(found, result.best.plan))


def _profile_of(found: Exploration, plan: Plan) -> Profile:
    """The costs of the way that the plan's stages run."""
    other = found.other_way
    return found.profile if other is None or plan.compiled == found.compiled else other.profile


def _request(options: dict[str, Any]) -> Request:
    if options["dataset_size"] is not None and options["dataset_size"] < 1:
        raise BaPipeError(f"--dataset-size must be at least 1, got {options['dataset_size']}; raise it")
    values = {field.name: options[field.name] for field in dataclasses.fields(Request) if field.name in options}
    for name in ("layer_error", "link_error"):
        if values[name] is not None:
            values[name] = parse_share(values[name], what=f"--{name.replace('_', '-')}")
    if values["effort"] not in EFFORTS and values["effort"][:1].isdigit():
        values["effort"] = parse_seconds(values["effort"], what="--effort")
    return Request(**values)


def _summary(plan: Plan, found: Exploration, options: dict[str, Any]) -> dict[str, Any]:
    """The plan, flat, as --json prints it."""
    values = {
        **flat_plan(plan, dataset_size=options["dataset_size"]),
        "caps": plan.schedule.caps,
        "equation_1": found.ideal,
        "steps": [dataclasses.asdict(step) for step in found.steps],
    }
    if options["report"]:
        values["report"] = options["report"]
    return cast(dict[str, Any], plain_number(values))


def _print(plan: Plan, found: Exploration, options: dict[str, Any]) -> None:
    from bapipe.reporting.terminal.console import terminal
    from bapipe.reporting.terminal.plan_table import render_plan, render_steps
    from bapipe.reporting.terminal.timeline_text import render_text
    from bapipe.reporting.terminal.way_table import render_ways

    console = terminal()
    console.print(render_plan(plan))
    if options["explain"]:
        if found.other_way is not None:
            console.print(render_ways(found))
        console.print(render_steps(found.paper_steps))
    timeline, title, copies = found.best.timeline, None, found.best.candidate.copies
    if copies > 1:
        timeline = first_copy(timeline, found.best.schedule.num_ranks // found.best.candidate.schedule.num_ranks)
        title = f"the first of {copies} replicas: rank i of it is rank {copies} · i of the plan"
    console.print(
        render_text(timeline, width=max(40, console.width), color=console.is_terminal, unit="s", title=title)
    )
    if options["dataset_size"]:
        epoch = options["dataset_size"] / plan.prediction.throughput
        console.print(f"one epoch of {options['dataset_size']} samples: {format_seconds(epoch)}")
    if options["out"]:
        console.print(f"wrote {options['out']}", soft_wrap=True)
    for line in options.get("written", ()):
        console.print(line, soft_wrap=True)


def _compare(profile: Profile, cluster: Cluster, request: Request, options: dict[str, Any]) -> None:
    rows: list[dict[str, Any]] = []
    for strategy in STRATEGIES:
        try:
            plan = make_plan(explore(profile, cluster, _with_strategy(request, strategy)))
        except InfeasibleError as error:
            rows.append({"strategy": strategy, "time": None, "reason": str(error)})
            continue
        rows.append(
            {
                "strategy": strategy,
                "kind": plan.kind,
                "schedule": plan.schedule.name,
                "stages": [
                    [len(stage.accelerators), stage.first_layer, stage.last_layer] for stage in plan.stages
                ],
                "microbatch_size": plan.microbatch_size,
                "global_batch": plan.global_batch,
                "time": plan.prediction.time,
                "throughput": plan.prediction.throughput,
                "gap": plan.prediction.gap,
                "memory_bytes": max(stage.memory_bytes for stage in plan.stages),
                "source": plan.prediction.source,
            }
        )
    if options["as_json"]:
        click.echo(json.dumps(plain_number({"model": profile.model.name, "strategies": rows}), indent=1))
    else:
        _print_comparison(profile, rows)


def _with_strategy(request: Request, strategy: str) -> Request:
    """The same request of another strategy; one that fixes the schedule has no K to choose."""
    if request.cap is not None and strategy in ("gpipe", "dp", *ENGINES):
        request = dataclasses.replace(request, cap=None, schedule=None)
    if request.zero_stage == "1" and strategy in ENGINES:
        request = dataclasses.replace(request, zero_stage="auto")
    return dataclasses.replace(request, strategy=strategy)


def _print_comparison(profile: Profile, rows: list[dict[str, Any]]) -> None:
    from rich.table import Table

    from bapipe.reporting.terminal.console import terminal

    best = max((row["throughput"] for row in rows if row["time"] is not None), default=1.0)
    table = Table(title=f"{profile.model.name}: strategies by the same simulator", title_justify="left")
    for header in ("strategy", "plan", "time", "relative", "over bound", "memory"):
        left = header in ("strategy", "plan")
        table.add_column(header, justify="left" if left else "right", no_wrap=header != "plan")
    for row in rows:
        if row["time"] is None:
            table.add_row(row["strategy"], "does not fit", *["–"] * 4)
            continue
        counts = "-".join(str(stage[0]) for stage in row["stages"])
        table.add_row(
            row["strategy"],
            f"{row['schedule']} {counts}, b={row['microbatch_size']}",
            format_seconds(row["time"]),
            f"{row['throughput'] / best:.3f}x",
            f"{row['gap']:.1%}",
            format_bytes(row["memory_bytes"]),
        )
    console = terminal()
    console.print(table)
    console.print(
        "1-1-1: accelerators of each stage; b: micro-batch size; relative: throughput over the best row's; "
        "memory: on the fullest accelerator.",
        soft_wrap=True,
    )
    sources = sorted({row["source"] for row in rows if row["time"] is not None})
    if sources != ["measured"]:
        console.print(f"Times are {', '.join(sources)}, not measured.")
