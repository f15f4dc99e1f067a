"""`bapipe profile`, `bapipe cluster detect`, `bapipe slices`: measure models, links and this machine."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from bapipe.cli.cluster_detect import detect_command
from bapipe.cli.cluster_show import show_command
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
from bapipe.cli.values import Counts, Numbers
from bapipe.costs.profile import CostTable, read_profile, write_profile
from bapipe.costs.profile_merge import merge_profiles
from bapipe.costs.profile_mix import mixed_profile
from bapipe.costs.profile_ways import has_both_ways, of_way
from bapipe.errors import BaPipeError
from bapipe.hardware.precision import DEFAULT_PRECISION
from bapipe.hardware.transport_names import TRANSPORTS
from bapipe.io.files import check_output, dump_json, write_text
from bapipe.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from bapipe.torch.profiler import Measurement, Profiled
    from bapipe.torch.profiler.background_load import Load

__all__ = [
    "cluster_group",
    "merge_command",
    "profile_command",
    "slices_group",
    "slices_start",
    "slices_status",
    "slices_stop",
]


_LOAD_SIZE = 16
"""largest micro-batch with which other slices or ranks train meanwhile"""


@click.command("profile", cls=CompilingCommand)
@click.argument("model", required=False)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@renamed("--micro-batch", "microbatches", type=Counts(), default="1,2,4,8", show_default=True, help="Sizes.")
@renamed("--precision", default=DEFAULT_PRECISION, show_default=True, help=PRECISION_HELP)
@model_options
@click.option(
    "-o", "--out", type=click.Path(dir_okay=False), help="Write profile.json (with --links: cluster.toml)."
)
@click.option("--type", "accelerator", help="Accelerator type to file the costs under.  [default: by the device]")
@click.option(
    "--optimizer", default="sgd", show_default=True, help="sgd, momentum, adam, adamw or package.module:Class."
)
@optimizer_options
@click.option(
    "--iterations", type=int, help="Samples of each time, as the paper's 1000.  [default: until 2 % sure]"
)
@click.option(
    "--threads", type=int, default=1, show_default=True, help="Of a CPU rank; a run gives each rank as many."
)
@click.option("--calibrate", is_flag=True, help="Scale the layers to the whole step; the profile says so.")
@compile_option("Measure layers as torch.compile makes them; auto: both ways, for plans that take the faster one.")
@click.option(
    "--parts",
    is_flag=True,
    help="Also time each layer in two parts, for plans that divide it; takes twice as long.",
)
@click.option("--fresh", is_flag=True, help="Forget what was measured before.")
@click.option("--details", type=click.Path(dir_okay=False), help="Write everything measured as JSON.")
@click.option(
    "--slice-of",
    type=int,
    help="Cut the GPU into this many equal slices and profile one of them, the others loaded.",
)
@click.option("--slice-memory", help="Memory of each slice, such as 16GB.")
@click.option("--slice", type=int, default=0, help="Which slice, where the GPU is cut (bapipe slices start).")
@click.option("--links", is_flag=True, help="Measure links between ranks of this machine instead of a model.")
@click.option(
    "--ranks",
    type=click.IntRange(min=1, max=64),
    help="For --links.  [default: all GPUs or slices, or 2 on CPUs] For a model on a CPU: ranks that train it "
    "at once, one of which is measured.  [default: 1]",
)
@click.option(
    "--transport",
    type=click.Choice(TRANSPORTS),
    default="auto",
    show_default=True,
    help="For --links: what carries messages; auto is what a run would take.",
)
@click.option("--backend", type=click.Choice(["gloo", "nccl"]), hidden=True)  # older name of --transport
def profile_command(model: str | None, **options: Any) -> None:
    """Measure what every layer of MODEL costs on a device of this machine.

    MODEL is package.module:function, which returns (module, args, kwargs); a model of transformers as hf:gpt2,
    hf:folder or hf:org/name; or vgg16, resnet50, gnmt-8, gpt, unet.
    Ctrl-C keeps what was measured: the same command goes on from there.

    \b
    Examples:
      bapipe profile vgg16 --device cuda --micro-batch 1,2,4,8,16,32,64 -o profile.json
      bapipe profile my_package.my_model:build --arg layers=24 --precision bf16-mixed --device cuda -o profile.json
      bapipe profile hf:llama --arg num_hidden_layers=8 --lora r=8 --device cuda -o profile.json
      bapipe profile gnmt-8 --device cuda --slice-of 4 --slice-memory 16GB -o slice.json
      bapipe profile gpt --ranks 2 -o two-ranks.json
      bapipe profile --links --ranks 4 -o cluster.toml
    """
    if options["links"]:
        if model is not None:
            raise BaPipeError(f"--links measures this machine, not a model; leave out '{model[:60]}'")
        _links(options)
        return
    if model is None:
        raise BaPipeError("name a model to profile, such as vgg16 or package.module:function, or give --links")
    options["optimizer"] = read_optimizer(options)
    check_output(options["out"])
    check_output(options["details"])
    found = _profile(model, options)
    if options["out"]:
        write_profile(found.profile, options["out"])
    if options["details"]:
        write_text(options["details"], dump_json(_details(found)))
    _print(found, options["out"])
    gc.freeze()  # or the interpreter looks through all that torch and the capture made before it ends
    if not found.complete:
        click.echo("stopped early: the same command goes on from here", err=True)
        raise click.exceptions.Exit(130)


def _profile(model: str, options: dict[str, Any]) -> Profiled:
    from bapipe.torch.profiler import MeasureSettings, profile_model

    arguments = read_model_arguments(model, options)
    settings = MeasureSettings(
        microbatches=tuple(sorted(set(options["microbatches"]))),
        iterations=options["iterations"],
        fresh=options["fresh"],
        parts=options["parts"],
    )
    with _beside(model, arguments, options) as load, progress_bar("capturing") as report:
        return profile_model(
            model,
            settings=settings,
            device=options["device"],
            precision=options["precision"],
            args=arguments,
            optimizer=options["optimizer"],
            accelerator=options["accelerator"],
            calibrate=options["calibrate"],
            compile_=options["compiled"],
            threads=options["threads"] if options["device"] == "cpu" else None,
            slice_=load.name if load else "",
            before=load.wait if load else None,
            report=report,
        )


def _beside(
    model: str, arguments: dict[str, Any], options: dict[str, Any]
) -> contextlib.AbstractContextManager[Load | None]:
    """What trains beside what is measured: the other slices of a GPU, or the other ranks of a CPU."""
    from bapipe.torch.profiler.background_load import beside_ranks

    ranks = options["ranks"]
    if ranks is None:
        return _sliced(model, arguments, options)
    if options["device"] != "cpu":
        raise BaPipeError(
            "--ranks of a profile are those of a CPU: GPUs share nothing, and slices are cut by --slice-of; "
            "leave it out, or use --device cpu"
        )
    return beside_ranks(
        ranks,
        model,
        arguments,
        precision=options["precision"],
        microbatch=_load_size(options),
        threads=options["threads"],
        compiled=options["compiled"] is True,
    )


def _load_size(options: dict[str, Any]) -> int:
    """The micro-batch of what trains beside: the largest that is measured and not too large for every rank."""
    sizes: tuple[int, ...] = options["microbatches"]
    return max([size for size in sizes if size <= _LOAD_SIZE] or [min(sizes)])


@contextlib.contextmanager
def _sliced(model: str, arguments: dict[str, Any], options: dict[str, Any]) -> Iterator[Load | None]:
    """Put this process on a slice with the others loaded, if asked or if the GPU is cut already."""
    import os

    from bapipe.torch import slices
    from bapipe.torch.profiler.background_load import loaded

    on_gpu = options["device"].startswith("cuda")
    if not on_gpu and options["slice_of"] is not None:
        raise BaPipeError(f"--slice-of cuts a GPU, got --device {options['device']}; add --device cuda")
    gpu = int(options["device"].partition(":")[2] or 0) if on_gpu else 0
    before = slices.status(gpu) if on_gpu else None
    if options["slice_of"] is None and before is None:
        yield None
        return
    index = options["slice"]
    if options["slice_of"] is not None:
        memory = parse_bytes(options["slice_memory"], what="--slice-memory") if options["slice_memory"] else None
        cut = slices.start(slices.even_slices(options["slice_of"]), memory=memory, gpu=gpu)
    else:
        assert before is not None
        cut = before
        click.echo(f"on slice {index} of {len(cut)}: {slices.describe(cut, index)}, the others loaded", err=True)
    os.environ.update(slices.slice_environment(cut, index))
    options["device"] = "cuda"
    try:
        with loaded(
            cut,
            index,
            model,
            arguments,
            precision=options["precision"],
            microbatch=_load_size(options),
            compiled=options["compiled"] is True,
        ) as load:
            yield load
    finally:
        if before is None:
            click.echo("the MPS daemon still runs; end it with bapipe slices stop", err=True)


def _details(found: Profiled) -> Any:
    """Everything that was measured; of layers as captured and compiled, both."""
    if found.measured_compiled is None:
        return found.measured
    return {"captured": found.measured, "compiled": found.measured_compiled}


def _print(found: Profiled, out: str | None) -> None:
    from rich.table import Table

    from bapipe.reporting.terminal.console import terminal

    console = terminal()
    name, costs = next(iter(found.profile.accelerators.items()))
    row = len(costs.microbatches) - 1
    title = f"{found.profile.model.name} on {name}, {found.profile.dtype}, micro-batch {costs.microbatches[row]}"
    table = Table(title=title, title_justify="left")
    added = ("each part adds",) if costs.part_forward and costs.part_backward else ()
    for header in ("layer", "parameters", "forward", "backward", "weight gradient", "crosses", "saved", *added):
        table.add_column(header, justify="left" if header == "layer" else "right", overflow="fold")
    assert costs.weight_gradient is not None
    for index, layer in enumerate(found.profile.layers):
        table.add_row(
            layer.name,
            f"{layer.parameters:,}",
            format_seconds(costs.forward[row][index]),
            format_seconds(costs.backward[row][index]),
            format_seconds(costs.weight_gradient[row][index]),
            format_bytes(costs.boundary_forward[row][index]),
            format_bytes(costs.saved_activations[row][index]),
            *_part_cells(costs, row, index),
        )
    console.print(table)
    _print_agreement(found.measured)
    if costs.not_fitting:
        console.print("ran out of memory at micro-batch " + ", ".join(str(size) for size in costs.not_fitting))
    for note in (*found.measured.notes, *_compiled_lines(found), *found.notes):
        console.print(note, soft_wrap=True)
    console.print(f"took: {found.phases}", soft_wrap=True)
    if out:
        console.print(f"wrote {out}", soft_wrap=True)


def _compiled_lines(found: Profiled) -> Iterator[str]:
    """What all layers take compiled beside what they take as captured, a line for each micro-batch."""
    if not has_both_ways(found.profile):
        return
    captured, compiled = (of_way(found.profile, compiled=way) for way in (False, True))
    name, table = next(iter(compiled.accelerators.items()))
    for size in table.microbatches:
        if size in captured.table(name).microbatches:
            before, after = (own.at(name, size) for own in (captured, compiled))
            layers = [float((own.forward + own.backward).sum()) for own in (before, after)]
            parting = [float(own.parting.sum()) for own in (before, after)]
            yield (
                f"compiled, micro-batch {size}: layers take {format_seconds(layers[1])}, as captured "
                f"{format_seconds(layers[0])}; a split backward adds {format_seconds(parting[1])}, as captured "
                f"{format_seconds(parting[0])}"
            )
    if "compile" in found.phases.seconds:
        seconds = format_seconds(found.phases.seconds["compile"])
        yield f"compiling took {seconds}, which a run spends once, before its first step, and no plan counts"


def _part_cells(costs: CostTable, row: int, index: int) -> list[str]:
    """Seconds that each of two parts takes beyond its share, where that is known."""
    if costs.part_forward is None or costs.part_backward is None:
        return []
    return [format_seconds(costs.part_forward[row][index] + costs.part_backward[row][index])]


def _print_agreement(measured: Measurement) -> None:
    from rich.table import Table

    from bapipe.reporting.terminal.console import terminal
    from bapipe.torch.profiler.assemble_profile import agreement, spread

    table = Table(title="forward and backward of all layers against the whole step", title_justify="left")
    for header in ("micro-batch", "sum of layers", "whole step", "residual", "rounds differ"):
        table.add_column(header, justify="right")
    for size in measured.sizes():
        found = agreement(measured, size)
        if found is not None:
            table.add_row(
                str(size),
                format_seconds(found.layers),
                format_seconds(found.eager),
                f"{found.residual:+.1%}",
                f"{spread(measured, size)[0]:.1%}",
            )
    if table.row_count:
        terminal().print(table)


def _links(options: dict[str, Any]) -> None:
    from bapipe.torch.profiler.detect_machine import cluster_text, detect
    from bapipe.torch.profiler.measure_links import measure_links

    check_output(options["out"])
    device = options["device"].partition(":")[0]
    if device not in ("cpu", "cuda"):
        raise BaPipeError(f"a device is cpu or cuda, got '{device[:60]}'")
    ranks = options["ranks"] or (max(2, detect(device=device).count) if device == "cuda" else 2)
    measured = measure_links(ranks, transport=options["backend"] or options["transport"], device=device)
    text = cluster_text(detect(ranks=ranks, threads=options["threads"], device=device), measured)
    if options["out"]:
        write_text(options["out"], text)
    _print_links(measured.pairs, "point to point")
    _print_links(measured.together, "all neighbours at once")
    _print_links(measured.all_reduce, "all-reduce from the first rank to the last")
    _print_links(measured.buckets, "all-reduces in buckets, queued")
    _print_links(measured.gather, "all-gather")
    _print_links(measured.scatter, "reduce-scatter")
    _print_links(measured.unit_gather, "a unit of FSDP2, gathered")
    _print_links(measured.unit_scatter, "a unit of FSDP2, its gradients scattered")
    click.echo(measured.reason)
    click.echo(f"wrote {options['out']}" if options["out"] else text)


def _print_links(samples: Any, title: str) -> None:
    from rich.table import Table

    from bapipe.reporting.terminal.console import terminal

    table = Table(title=title, title_justify="left")
    for header in ("ranks", "message", "directions", "ranks compute", "time", "bytes/s each"):
        table.add_column(header, justify="right")
    for item in samples:
        table.add_row(
            f"{item.first} to {item.second}",
            format_bytes(item.nbytes),
            "both" if item.both else "one",
            "yes" if item.busy else "no",
            format_seconds(item.seconds.median),
            f"{format_bytes(item.nbytes / item.seconds.median)}/s",
        )
    terminal().print(table)


@click.command("merge")
@click.argument("profiles", nargs=-1, required=True, type=click.Path(dir_okay=False))
@click.option("-o", "--out", required=True, type=click.Path(dir_okay=False), help="Write the merged profile.json.")
@click.option("--replace", "replace_older", is_flag=True, help="Where two have the same size, the later one wins.")
@click.option("--mix", type=Numbers(), help="How often each comes, such as 3,1: costs of a batch on average.")
def merge_command(profiles: tuple[str, ...], out: str, replace_older: bool, mix: tuple[float, ...] | None) -> None:
    """Merge PROFILES of one model into one: of several machines, or with --mix of inputs of several lengths.

    \b
    Examples:
      bapipe merge h200.json v100.json -o both.json
      bapipe merge short.json long.json --mix 3,1 -o mix.json
    """
    read = [read_profile(path) for path in profiles]
    merged = merge_profiles(read, replace_older=replace_older) if mix is None else mixed_profile(read, mix)
    write_profile(merged, out)
    click.echo(f"wrote {out}: {merged.model.name} on {', '.join(merged.accelerators)}")


@click.group("cluster")
def cluster_group() -> None:
    """Describe machines, and show what a cluster file says."""


cluster_group.add_command(show_command)
cluster_group.add_command(detect_command)


@click.group("slices")
def slices_group() -> None:
    """Cut one GPU into several by CUDA MPS, to rehearse a multi-GPU plan."""


@slices_group.command("start")
@click.option("--count", type=int, default=4, show_default=True, help="Equal slices.")
@click.option("--percentages", type=Numbers(), help="Unequal slices, such as 50,25,12.5,12.5.")
@click.option("--memory", help="Of each slice, such as 16GB.")
@click.option("--gpu", type=int, default=0, show_default=True)
def slices_start(count: int, percentages: tuple[float, ...] | None, memory: str | None, gpu: int) -> None:
    """Start the MPS daemon and print each slice's environment.

    \b
    Example:
      bapipe slices start --count 4 --memory 16GB
    """
    from bapipe.torch import slices

    limit = parse_bytes(memory, what="--memory") if memory else None
    _print_slices(slices.start(percentages or slices.even_slices(count), memory=limit, gpu=gpu))


@slices_group.command("status")
@click.option("--gpu", type=int, default=0, show_default=True)
def slices_status(gpu: int) -> None:
    """Say whether the GPU is cut, and how."""
    from bapipe.torch import slices

    found = slices.status(gpu)
    if found is None:
        click.echo(f"GPU {gpu} is not cut")
    else:
        _print_slices(found)


@slices_group.command("stop")
@click.option("--gpu", type=int, default=0, show_default=True)
def slices_stop(gpu: int) -> None:
    """Stop the MPS daemon; the GPU is whole again."""
    from bapipe.torch import slices

    click.echo(f"GPU {gpu} is whole again" if slices.stop(gpu) else f"GPU {gpu} was not cut")


def _print_slices(found: Any) -> None:
    from bapipe.torch import slices

    for index in range(len(found)):
        click.echo(f"# slice {index}: {found.percentages[index]:g} % of GPU {found.gpu}")
        click.echo(slices.exported(slices.slice_environment(found, index)))
