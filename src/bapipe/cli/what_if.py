"""`bapipe what-if`: batch time against a figure of the cluster, or two."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

from bapipe.analysis.what_if import WhatIf, fpga_answers, gpu_answers, parse_sweep, sweep_cluster
from bapipe.cli.completion import complete_cluster, complete_model, complete_schedule
from bapipe.cli.fpga import read_cnn
from bapipe.cli.options import PRECISION_HELP, renamed
from bapipe.cli.values import plain_number
from bapipe.costs.profile import Profile
from bapipe.errors import BaPipeError
from bapipe.fpga import parse_assumptions
from bapipe.hardware.cluster import Cluster
from bapipe.hardware.cluster_file import read_cluster
from bapipe.io.files import write_text
from bapipe.planner import Request
from bapipe.planner.inputs import FPGA_DTYPE, goes_on_fpgas, profile_for

__all__ = ["what_if_command"]


@click.command("what-if")
@click.argument("model", shell_complete=complete_model)
@click.option("--cluster", required=True, shell_complete=complete_cluster,
              help="TOML file, or a shorthand such as 4xvcu118 or 4xv100.")  # fmt: skip
@click.option("--sweep", "sweeps", multiple=True, required=True, metavar="NAME=LOW..HIGH",
              help="Once or twice: link, memory, count, ddr, board.dsp, vcu118.ram…; or NAME=A,B,C.")  # fmt: skip
@click.option("--points", type=int, default=7, show_default=True, help="Values from LOW to HIGH.")
@renamed("--global-batch", "global_batch", type=int, help="Samples per optimizer step.  [default: as bapipe plan]")
@renamed("--micro-batch", "microbatch", type=int, help="Micro-batch size.  [default: the best]")
@click.option("--schedule", shell_complete=complete_schedule, help="Only this schedule.")
@renamed("--precision", show_default="a profile's own, or fp32; fp16 on FPGAs", help=PRECISION_HELP)
@click.option("--assume", multiple=True, metavar="NAME=VALUE", help="An assumption of the FPGA model.")
@click.option("--svg", type=click.Path(dir_okay=False), help="Draw it into this file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def what_if_command(model: str, **options: Any) -> None:
    """Plan MODEL on clusters that differ in one figure or two, and say what binds on each side.

    \b
    Examples:
      bapipe what-if resnet50 --cluster 4xvcu129 --sweep board.dsp=4000..16000 --sweep link=50..500Gb/s
      bapipe what-if vgg16 --cluster 4xv100 --sweep link=1..25GB/s --svg link.svg
    """
    sweeps = [parse_sweep(text, points=options["points"]) for text in options["sweeps"]]
    cluster = read_cluster(options["cluster"])
    request = Request(
        global_batch=options["global_batch"], microbatch=options["microbatch"], schedule=options["schedule"]
    )
    if goes_on_fpgas(model, cluster):
        answer = fpga_answers(
            read_cnn(model),
            request,
            dtype=options["precision"] or FPGA_DTYPE,
            parameters=parse_assumptions(options["assume"]),
        )
    else:
        if options["assume"]:
            raise BaPipeError("--assume is for FPGA clusters and models without a profile; leave it out")
        answer = gpu_answers(lambda own: _profile(model, own, options), request)
    found = sweep_cluster(cluster, sweeps, answer)
    title = f"{model} on {options['cluster']}"
    if options["svg"]:
        from bapipe.reporting.terminal.what_if_chart import what_if_svg

        write_text(options["svg"], what_if_svg(found, title=title))
    if options["as_json"]:
        click.echo(json.dumps(plain_number(_values(found)), indent=1, allow_nan=False))
        return
    from bapipe.reporting.terminal.console import terminal
    from bapipe.reporting.terminal.what_if_chart import render_what_if

    console = terminal()
    console.print(render_what_if(found, title=title))
    if options["svg"]:
        console.print(f"wrote {options['svg']}", soft_wrap=True)


def _values(found: WhatIf) -> dict[str, Any]:
    values = dataclasses.asdict(found)
    for value, point in zip(values["points"], found.points, strict=True):
        value["answer"]["binds"] = point.answer.binds
    return values


def _profile(model: str, cluster: Cluster, options: dict[str, Any]) -> Profile:
    return profile_for(model, cluster, microbatch=options["microbatch"], precision=options["precision"])
