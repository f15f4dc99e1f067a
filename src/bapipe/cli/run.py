"""`bapipe run`: train by a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from bapipe.errors import BaPipeError
from bapipe.hardware.transport_names import TRANSPORTS
from bapipe.torch.checkpoint.checkpoint_options import CHANGES, Saving
from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.runtime.engines import ENGINES

__all__ = ["read_options", "run_command", "run_options"]


def run_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of a run, which `bapipe run` and `bapipe launch` share."""
    usual = RunOptions()
    options = [
        click.option("--steps", type=int, default=usual.steps, show_default=True, help="Optimizer steps."),
        click.option("--check", is_flag=True, help="Compare every gradient with training in one process."),
        click.option(
            "--out",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Write run.json: losses and the recorded timeline.",
        ),
        click.option("--seed", type=int, default=usual.seed, show_default=True, help="Of weights and data."),
        click.option("--learning-rate", type=float, default=usual.learning_rate, show_default=True),
        click.option(
            "--timeout",
            type=float,
            default=usual.timeout,
            show_default=True,
            help="Seconds before a silent rank is given up.",
        ),
        click.option(
            "--data",
            type=click.Choice(["synthetic", "digits"]),
            default=usual.data,
            show_default=True,
            help="What the model's own make_batch makes, or scikit-learn's handwritten digits.",
        ),
        click.option(
            "--engine",
            type=click.Choice(ENGINES),
            default=usual.engine,
            show_default=True,
            help="What runs the stages: BaPipe's own runtime, or torch.distributed.pipelining's.",
        ),
        click.option(
            "--transport",
            type=click.Choice(TRANSPORTS),
            default=usual.transport,
            show_default=True,
            help="How tensors get from rank to rank.",
        ),
        click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Instead of what the plan has."),
        click.option(
            "--compile/--no-compile",
            "compiled",
            default=usual.compiled,
            help="Run layers as torch.compile makes them.  [default: as planned]",
        ),
        click.option(
            "--trace/--no-trace",
            default=usual.trace,
            show_default=True,
            help="Record when every action starts and ends.",
        ),
        click.option(
            "--vertical-sync",
            is_flag=True,
            help="Of a pipedream plan: all stages use stage 0's version of the weights.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object per step."),
        click.option(
            "--tensorboard",
            type=click.Path(file_okay=False, path_type=Path),
            help="Write every step's figures for TensorBoard.",
        ),
        click.option(
            "--log",
            multiple=True,
            help="Where else they go: csv:FILE, tensorboard:FOLDER, wandb:PROJECT or package.module:function.",
        ),
        click.option(
            "--checkpoint",
            "folder",
            type=click.Path(file_okay=False, path_type=Path),
            help="Folder to save the training into.",
        ),
        click.option("--every", type=int, help="Steps between two checkpoints.  [default: only the last]"),
        click.option("--keep", type=int, default=2, show_default=True, help="Complete checkpoints that stay."),
        click.option("--async", "asynchronous", is_flag=True, help="Write checkpoints while training goes on."),
        click.option("--resume", is_flag=True, help="Go on from the last complete checkpoint, under any plan."),
        click.option(
            "--accept-changes",
            metavar="WORD[,WORD…]",
            default="",
            callback=lambda _context, _option, value: tuple(word for word in value.split(",") if word),
            help=f"Of {', '.join(CHANGES)}: what may differ from the checkpoint; what is here is used.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def read_options(options: dict[str, Any]) -> RunOptions:
    """What `run_options` gave a command; what is about checkpoints, the fields of `Saving`, as `saving`."""
    names = {field.name for field in fields(Saving)}
    rest = {name: value for name, value in options.items() if name not in names}
    about = {name: value for name, value in options.items() if name in names}
    if about["folder"] is None:
        if about["every"] is not None or about["asynchronous"] or about["resume"] or about["accept_changes"]:
            raise BaPipeError(
                "--every, --async, --resume and --accept-changes are about checkpoints; give their folder: "
                "--checkpoint"
            )
        return RunOptions(**rest)
    return RunOptions(**rest, saving=Saving(**about))


@click.command("run")
@click.argument("plan_file", type=click.Path(dir_okay=False))
@run_options
@click.option("--restarts", type=click.IntRange(min=0), default=0, show_default=True,
              help="How often all ranks may be started again when one fails.")  # fmt: skip
@click.option("--elastic", is_flag=True, help="When an accelerator is lost, plan again without it and go on.")
@click.option("--elastic-speed", "speed", is_flag=True,
              help="As --elastic, and also plan again when a rank has become slow.")  # fmt: skip
@click.option("--profile", type=click.Path(dir_okay=False), help="With --elastic: what the plan was made from.")
def run_command(
    plan_file: str, restarts: int, elastic: bool, speed: bool, profile: str | None, **options: Any
) -> None:
    """Train by PLAN_FILE on this machine, one process per rank.

    \b
    Examples:
      bapipe run plan.json --steps 100 --check --out run.json
      bapipe run plan.json --steps 100 --checkpoint saved --every 10 --resume
      bapipe run plan.json --steps 100 --checkpoint saved --every 10 --elastic --profile profile.json
    """
    from bapipe.torch.launch.launcher import launch

    chosen = read_options(options)
    if elastic or speed:
        from bapipe.torch.launch.elastic import launch_elastic

        if chosen.saving is None or profile is None:
            raise BaPipeError(
                "--elastic plans again and goes on, so it needs --profile and --checkpoint; give both"
            )
        if restarts:
            raise BaPipeError("--elastic goes on without what is lost, --restarts with it; give one of them")
        if speed and not chosen.trace:
            raise BaPipeError("--elastic-speed judges ranks by the times of their actions; leave --no-trace out")
        code = launch_elastic(plan_file, chosen, profile=profile, speed=speed)
    elif profile is not None:
        raise BaPipeError("--profile is to plan again with --elastic; give that too, or leave it out")
    else:
        code = launch(plan_file, chosen, restarts=restarts)
    if code:
        raise click.exceptions.Exit(code)
