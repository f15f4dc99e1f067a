"""`bapipe fit`: the largest micro-batch, sequence or depth that fits, and what each way to fit more costs."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

from bapipe.analysis.largest_fit import LargestFit, Quantity, SizeRange, climb_ladder
from bapipe.cli.options import PRECISION_HELP, optimizer_options, read_optimizer, renamed
from bapipe.cli.values import plain_number
from bapipe.costs.optimizers import OPTIMIZERS
from bapipe.costs.profile import Profile
from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import Cluster
from bapipe.io.files import write_text
from bapipe.models.builtin import Argument, size_option
from bapipe.models.model_spec import parse_model_spec
from bapipe.planner import Request
from bapipe.planner.inputs import cluster_with, goes_on_fpgas, profile_for
from bapipe.planner.request import profiled_range

__all__ = ["fit_command"]


@click.command("fit")
@click.argument("model")
@click.option("--cluster", required=True, help="TOML file, or a shorthand such as 4xv100.")
@click.option("--largest", type=click.Choice(["batch", "sequence", "depth"]), default="batch", show_default=True,
              help="What grows: samples of a micro-batch, tokens of a sequence, or blocks.")  # fmt: skip
@renamed("--global-batch", "global_batch", type=int,
         help="Samples per optimizer step.  [default: 4 micro-batches per accelerator]")  # fmt: skip
@click.option(
    "--optimizer",
    help=f"{', '.join(OPTIMIZERS)}, or one that was profiled.  [default: as profiled, or sgd]",
)
@optimizer_options
@renamed("--precision", show_default="a profile's own, or fp32", help=PRECISION_HELP)
@click.option("--memory-limit", help="Memory to plan with on each accelerator, such as 12GB.")
@click.option("--link-bandwidth", help="Of every link, such as 1.6GB/s.")
@click.option("--svg", type=click.Path(dir_okay=False), help="Draw it into this file.")
@click.option("--report", type=click.Path(dir_okay=False), help="Write it as an HTML page.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def fit_command(model: str, **options: Any) -> None:
    """Find the largest MODEL, or batch of it, that fits a cluster, and what each way to fit more costs.

    Every row allows more than the one before: data parallelism, layers that recompute, pipeline stages. With
    gradient accumulation any global batch fits whose micro-batch does, so `--largest batch` says which do.

    \b
    Examples:
      bapipe fit gpt2-medium --cluster 4xv100 --optimizer adam
      bapipe fit llama-7b --cluster 8xa100-80gb --largest sequence --precision bf16 --report fit.html
    """
    options["optimizer"] = read_optimizer(options)
    cluster = cluster_with(
        options["cluster"], memory_limit=options["memory_limit"], link_bandwidth=options["link_bandwidth"]
    )
    if goes_on_fpgas(model, cluster):
        raise BaPipeError("bapipe fit is for GPUs and CPUs; for FPGAs use bapipe what-if --sweep memory=LOW..HIGH")
    found = _ladder(model, cluster, options)
    title = f"{model} on {options['cluster']}"
    if options["svg"] or options["report"]:
        from bapipe.reporting.terminal.fit_table import fit_page, fit_svg

        for path, draw in ((options["svg"], fit_svg), (options["report"], fit_page)):
            if path:
                write_text(path, draw(found, title=title))
    if options["as_json"]:
        click.echo(json.dumps(plain_number(dataclasses.asdict(found)), indent=1, allow_nan=False))
        return
    from bapipe.reporting.terminal.console import terminal
    from bapipe.reporting.terminal.fit_table import render_fit

    console = terminal()
    console.print(render_fit(found, title=title))
    sources = {table.source for table in _profile(model, cluster, options).accelerators.values()}
    if sources != {"measured"}:
        console.print(f"Times are {', '.join(sorted(sources))}, not measured.", soft_wrap=True)
    for path in (options["svg"], options["report"]):
        if path:
            console.print(f"wrote {path}", soft_wrap=True)


def _profile(
    model: str, cluster: Cluster, options: dict[str, Any], args: dict[str, Argument] | None = None
) -> Profile:
    return profile_for(model, cluster, microbatch=None, precision=options["precision"], args=args)


def _ladder(model: str, cluster: Cluster, options: dict[str, Any]) -> LargestFit:
    quantity: Quantity = options["largest"]

    def request(microbatch: int) -> Request:
        return Request(
            global_batch=options["global_batch"] or 4 * len(cluster) * microbatch,
            microbatch=microbatch,
            optimizer=options["optimizer"],
            effort="low",
        )

    base = _profile(model, cluster, options)
    least, most, _ = profiled_range(base, cluster)
    if quantity == "batch":
        if options["global_batch"]:
            most = min(most, options["global_batch"])
        sizes = SizeRange(least=least, step=0, most=most)
        return climb_ladder(lambda _: base, request, cluster, sizes, quantity=quantity, asked=least)
    if parse_model_spec(model).kind != "builtin":
        raise BaPipeError(
            f"'{model[:60]}' is of one {quantity}; profile the model at others and run bapipe plan on each, or "
            "use --largest batch"
        )
    option = size_option(model, quantity)
    sizes = SizeRange(least=option.least, step=option.step, most=option.most)
    return climb_ladder(
        lambda size: _profile(model, cluster, options, {option.name: size}),
        lambda _: request(least),
        cluster,
        sizes,
        quantity=quantity,
        asked=option.usual,
    )
