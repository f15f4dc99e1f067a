"""`bapipe launch`: what to start on every node of a plan, or the plan itself where it has one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from bapipe.cli.run import read_options, run_options
from bapipe.errors import BaPipeError
from bapipe.records.plan import Plan

__all__ = ["launch_command"]

TARGETS = ("torchrun", "slurm", "pytorchjob", "trainjob", "ray")


@click.command("launch")
@click.argument("plan_file", type=click.Path(dir_okay=False))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--print", "only_print", is_flag=True, help="Write the command of every node and a SLURM script.")
@click.option("--to", type=click.Choice(TARGETS), help="Write what this starts, and nothing else.")
@click.option("--image", help="The container of a pod, with BaPipe, your code and the plan in it.")
@click.option(
    "--runtime", default="torch-distributed", show_default=True, help="The cluster runtime that a TrainJob is for."
)
@click.option("--script", type=click.Path(dir_okay=False), help="Your own training script; ARGUMENTS are for it.")
@click.option("--head", help="Address of the first node.  [default: its name in the cluster file]")
@click.option("--port", type=click.IntRange(1, 65535), default=29500, show_default=True, help="On the first node.")
@run_options
def launch_command(
    plan_file: str,
    arguments: tuple[str, ...],
    only_print: bool,
    script: str | None,
    head: str | None,
    port: int,
    to: str | None,
    image: str | None,
    runtime: str,
    **options: Any,
) -> None:
    """Start PLAN_FILE on its nodes: with --print, the exact torchrun command of each, and a SLURM script; with
    --to one of them alone, a job of Kubernetes (pytorchjob, trainjob) or a script for Ray.

    Without either a plan of one node is started here. The options of a run are those of bapipe run; with --script
    your script runs instead, with the ARGUMENTS that follow.

    \b
    Examples:
      bapipe launch plan.json --print --steps 100
      bapipe launch plan.json --print --script train.py -- plan.json --epochs 3
      bapipe launch plan.json --to pytorchjob --image registry/train:1 --steps 100 > job.yaml
      bapipe launch plan.json --to ray --steps 100 > start_ray.py
    """
    from bapipe.torch.launch.launcher import check_here, check_run, run_checked, start_script, worker_arguments
    from bapipe.torch.launch.node_commands import node_commands, ranks_by_node, slurm_script

    if script is None and arguments:
        raise BaPipeError(f"'{arguments[0]}' is no option of a run; give --script to start your own script")
    chosen = read_options(options)
    runnable = check_run(plan_file, chosen)
    plan = runnable.plan
    program = worker_arguments(plan_file, chosen) if script is None else [script, *arguments]
    if to is not None:
        click.echo(_written(plan, program, to=to, head=head, port=port, image=image, runtime=runtime), nl=False)
        return
    if only_print:
        for command in node_commands(plan, program, head=head, port=port):
            click.echo(f"# on {command.node}: ranks {', '.join(map(str, command.ranks))}")
            click.echo(command.line)
            click.echo()
        click.echo("# or, as a batch script for SLURM:")
        click.echo(slurm_script(plan, program, port=port), nl=False)
        return
    nodes = ranks_by_node(plan)
    if len(nodes) > 1:
        raise BaPipeError(
            f"the plan has {len(nodes)} nodes ({', '.join(nodes)[:100]}); start on each what --print writes for it"
        )
    if script is not None:
        code = start_script(len(plan.ranks), program)
    else:
        check_here(runnable, chosen)
        code = run_checked(runnable, plan_file, chosen)
    if code:
        raise click.exceptions.Exit(code)


def _written(
    plan: Plan, program: Sequence[str], *, to: str, head: str | None, port: int, image: str | None, runtime: str
) -> str:
    """The plan as one kind of start takes it."""
    from bapipe.torch.launch.kubernetes_jobs import as_yaml, pytorch_job, train_job
    from bapipe.torch.launch.node_commands import node_commands, slurm_script
    from bapipe.torch.launch.ray_script import ray_script

    if to in ("pytorchjob", "trainjob") and image is None:
        raise BaPipeError(f"a {to} needs the container that its pods run; give --image")
    if to == "torchrun":
        return "".join(f"{command.line}\n" for command in node_commands(plan, program, head=head, port=port))
    if to == "slurm":
        return slurm_script(plan, program, port=port)
    if to == "pytorchjob":
        return as_yaml(pytorch_job(plan, program, image=str(image), port=port))
    if to == "trainjob":
        return as_yaml(train_job(plan, program, image=str(image), runtime=runtime))
    return ray_script(plan, program, port=port)
