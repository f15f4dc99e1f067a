"""`bapipe auto` and `bapipe calibrate`: from a model to a measured plan, and the step between profile and plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bapipe.cli.options import (
    PRECISION_HELP,
    CompilingCommand,
    compile_option,
    model_options,
    optimizer_options,
    read_model_arguments,
    read_optimizer,
    renamed,
)
from bapipe.cli.progress import progress_bar
from bapipe.cli.values import Counts
from bapipe.torch.trials.auto_options import AutoOptions
from bapipe.units import format_seconds

if TYPE_CHECKING:
    from bapipe.torch.trials.plan_race import RaceResult

__all__ = ["auto_command", "calibrate_command", "print_race"]

_USUAL = AutoOptions()


@click.command("auto", cls=CompilingCommand)
@click.argument("model")
@model_options
@renamed("--global-batch", type=int, help="Samples per optimizer step.  [default: 64 per GPU, 16 per CPU rank]")
@renamed("--micro-batch", "micro_batches", type=Counts(), help="Sizes to consider.  [default: powers of two]")
@click.option("--ranks", type=int, help="Accelerators to use.  [default: all GPUs, or all cores]")
@click.option(
    "--optimizer",
    default=_USUAL.optimizer,
    show_default=True,
    help="sgd, momentum, adam, adamw or package.module:Class.",
)
@optimizer_options
@renamed("--precision", default=_USUAL.precision, show_default=True, help=PRECISION_HELP)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="[default: GPUs, where there are any]")
@compile_option(
    "Measure, race and run layers as torch.compile makes them; auto: measure both ways, and run as is faster."
)
@click.option(
    "--race",
    "racing",
    type=int,
    default=_USUAL.racing,
    show_default=True,
    help="Plans to race; 1: the prediction decides.",
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=_USUAL.folder,
    show_default=True,
    help="Where everything is written.",
)
@click.option("--fresh", is_flag=True, help="Measure again what the folder has.")
@click.option("--steps", type=int, default=0, show_default=True, help="Steps to train with the plan afterwards.")
@click.option("--check", is_flag=True, help="With --steps: compare every gradient with training in one process.")
def auto_command(model: str, **options: Any) -> None:
    """Find the fastest way to train MODEL on this machine: detect, measure, plan, race.

    MODEL is package.module:function, which returns a module, (module, args) or (module, args, kwargs); a model of
    transformers as hf:gpt2, hf:folder or hf:org/name; or vgg16, resnet50, gnmt-8, gpt, unet. Layers and links are
    corrected by short runs, and plans whose predictions lie within error of each other are run for a few steps:
    the fastest goes to plan.json.

    \b
    Examples:
      bapipe auto my_model:build --global-batch 64
      bapipe auto gpt --arg blocks=8 --global-batch 32 --steps 20 --check
    """
    from bapipe.torch.trials.auto import auto

    options["optimizer"] = read_optimizer(options)
    steps, check = options.pop("steps"), options.pop("check")
    arguments = read_model_arguments(model, options)
    micro_batches = tuple(sorted(set(options.pop("micro_batches") or ())))
    with progress_bar("capturing") as bar:
        found = auto(
            model,
            AutoOptions(args=arguments, micro_batches=micro_batches, **options),
            say=click.echo,
            progress=bar,
        )
    if found.raced is not None:
        print_race(found.raced)
    _show(found.plan)
    click.echo(f"wrote {found.folder / 'plan.json'}")
    if not steps:
        click.echo(f"train with: bapipe run {found.folder / 'plan.json'} --steps 100")
        return
    from bapipe.torch.launch.launcher import launch
    from bapipe.torch.launch.run_options import RunOptions

    run = RunOptions(steps=steps, check=check, out=found.folder / "run.json")
    code = launch(found.folder / "plan.json", run)
    if code:
        raise click.exceptions.Exit(code)


def _show(plan: Any) -> None:
    from bapipe.reporting.terminal.console import terminal
    from bapipe.reporting.terminal.plan_table import render_plan

    terminal().print(render_plan(plan))


def print_race(raced: RaceResult) -> None:
    """What every plan took, the fastest first."""
    from rich.table import Table

    from bapipe.reporting.terminal.console import terminal
    from bapipe.reporting.terminal.plan_table import kind_words

    table = Table(title="raced: seconds of a global batch", title_justify="left")
    for header in ("plan", "micro-batch", "measured", "predicted", "longer by"):
        table.add_column(header, justify="left" if header == "plan" else "right")
    for trial in raced.trials:
        plan = trial.plan
        name = kind_words(plan) + (", compiled" if plan.compiled else "")
        chosen = " (chosen)" if trial is raced.best else ""
        if trial.seconds is None or trial.error is None:
            table.add_row(name, str(plan.microbatch_size), f"failed: {(trial.failure or '')[:60]}", "–", "–")
            continue
        table.add_row(
            name + chosen,
            str(plan.microbatch_size),
            format_seconds(trial.seconds),
            format_seconds(plan.prediction.time),
            f"{trial.error:+.1%}",
        )
    console = terminal()
    console.print(table)
    if raced.best is not raced.trials[0]:
        console.print(
            "chosen: the plan that was preferred before the race, as its steps and those of the fastest differ by "
            "no more than their error",
            soft_wrap=True,
        )


@click.command("calibrate")
@click.argument("profile_file", type=click.Path(dir_okay=False))
@click.option("--cluster", required=True, help="TOML file, or a shorthand such as 2xcpu.")
@renamed("--global-batch", type=int, help="Samples per optimizer step.  [default: 64 per accelerator]")
@click.option(
    "-o", "--out", required=True, type=click.Path(dir_okay=False), help="Write the corrected profile.json."
)
@click.option(
    "--out-cluster", required=True, type=click.Path(dir_okay=False), help="Write the corrected cluster.toml."
)
@click.option(
    "--timeout", type=float, default=300.0, show_default=True, help="Seconds before a silent rank is given up."
)
def calibrate_command(
    profile_file: str, cluster: str, global_batch: int | None, out: str, out_cluster: str, timeout: float
) -> None:
    """Correct a profile and a cluster by short runs on this machine, as training uses them.

    Pipelines at two micro-batch sizes and data parallelism are run for a few steps: layers are scaled to what they
    took while all ranks work, links to what messages took.

    \b
    Example:
      bapipe calibrate profile.json --cluster cluster.toml -o in-run.json --out-cluster in-run.toml
    """
    from bapipe.analysis.calibrate import write_calibrated
    from bapipe.costs.profile import read_profile
    from bapipe.hardware.cluster_file import read_cluster
    from bapipe.planner import Request
    from bapipe.planner.request import default_global_batch
    from bapipe.torch.launch.run_options import RunOptions
    from bapipe.torch.trials.probe import probe, probe_plans

    profile, hardware = read_profile(profile_file), read_cluster(cluster)
    batch = global_batch or default_global_batch(profile, hardware, None)
    plans = probe_plans(profile, hardware, Request(), batch)
    found, trials = probe(
        profile, hardware, plans, RunOptions(timeout=timeout), code=Path.cwd(), report=click.echo
    )
    for trial in trials:
        if trial.failure:
            click.echo(f"{trial.plan.schedule.name} did not run: {trial.failure}", err=True)
    write_calibrated(found, out, out_cluster)
    for line in (*found.changes, f"wrote {out}", f"wrote {out_cluster}"):
        click.echo(line)
