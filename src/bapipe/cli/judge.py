"""`bapipe judge`: how far a split made by hand is from the best plan."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from bapipe.cli.options import renamed
from bapipe.cli.values import plain_number
from bapipe.io.files import plain_values, write_text

if TYPE_CHECKING:
    from bapipe.analysis.judge_split import Judged, Judgement

__all__ = ["judge_command"]


@click.command("judge")
@click.argument("layout")
@click.option(
    "--profile", "model", required=True, help="profile.json, or another MODEL as `bapipe plan` takes it."
)
@click.option("--cluster", required=True, help="TOML file, or a shorthand such as 4xv100.")
@click.option("--cuts", help="Blocks or layers of each stage, such as 4,4,4, where LAYOUT is an order alone.")
@renamed("--global-batch", "global_batch", type=int, help="Samples per optimizer step.")
@renamed("--micro-batch", "microbatch", type=int, help="Micro-batch size.  [default: the best for either]")
@click.option("--schedule", help="Of the split.  [default: 1f1b-sno, interleaved with several stages per rank]")
@click.option(
    "--stages",
    type=int,
    help="Compare with the best plan of this many stages, none replicated.  [default: the best of all]",
)
@click.option("--optimizer", help="As in `bapipe plan`.")
@renamed("--precision", help="As in `bapipe plan`.")
@click.option("--trace", "trace_file", type=click.Path(dir_okay=False), help="Write both timelines as one trace.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def judge_command(layout: str, model: str, cluster: str, **options: Any) -> None:
    """Simulate a split that was made by hand, and show it beside the best plan.

    LAYOUT is Megatron's layout string or a file with it, counts of blocks or layers per stage (8,8,8,8), an order
    of torch.distributed.pipelining (.csv, with --cuts), or a plan.json.

    \b
    Examples:
      bapipe judge 'Et*2|(t*4|)*2t*2L' --profile gpt2 --cluster 4xv100 --global-batch 64
      bapipe judge 3,3,3,3 --profile profile.json --cluster cluster.toml --trace both.json
      bapipe judge order.csv --cuts 6,6 --profile profile.json --cluster 2xv100 --global-batch 64 --micro-batch 4
    """
    from bapipe.analysis.hand_split import read_split
    from bapipe.analysis.judge_split import judge
    from bapipe.hardware.cluster_file import read_cluster
    from bapipe.planner import Request
    from bapipe.planner.inputs import profile_for

    hardware = read_cluster(cluster)
    request = Request(
        global_batch=options["global_batch"],
        microbatch=options["microbatch"],
        stages=options["stages"],
        optimizer=options["optimizer"],
    )
    profile = profile_for(model, hardware, microbatch=options["microbatch"], precision=options["precision"])
    split = read_split(layout, [layer.name for layer in profile.layers], cuts=options["cuts"])
    found = judge(profile, hardware, split, request=request, schedule=options["schedule"])
    if options["trace_file"]:
        from bapipe.reporting.trace import trace_json

        text = trace_json({"given": found.given.timeline, "best plan": found.best.timeline})
        write_text(options["trace_file"], text)
    if options["as_json"]:
        click.echo(json.dumps(plain_number(_values(found)), indent=1, allow_nan=False))
        return
    _print(found)
    if options["trace_file"]:
        click.echo(f"wrote {options['trace_file']}")


def _values(found: Judgement) -> dict[str, Any]:
    return {
        "longer": found.longer,
        "bottleneck_layers": list(found.bottleneck_layers),
        "given": _figures(found.given),
        "best": _figures(found.best),
    }


def _figures(one: Judged) -> dict[str, Any]:
    names = ("name", "time", "throughput", "bubble", "memory", "short", "microbatch", "microbatches", "layers",
             "seconds", "bottleneck")  # fmt: skip
    return {name: plain_values(getattr(one, name)) for name in names}


def _print(found: Judgement) -> None:
    from bapipe.reporting.terminal.console import terminal
    from bapipe.reporting.terminal.judge_table import judgement_notes, judgement_table
    from bapipe.reporting.terminal.timeline_text import render_text

    console = terminal()
    width, color = max(40, console.width), console.is_terminal
    for title, one in (("given", found.given), ("best plan", found.best)):
        console.print(render_text(one.timeline, width=width, color=color, unit="s", title=title))
    console.print(judgement_table(found))
    for note in judgement_notes(found):
        console.print(note, soft_wrap=True)
