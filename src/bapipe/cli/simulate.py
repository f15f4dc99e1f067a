"""`bapipe simulate`: time, check and draw a schedule."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from bapipe.cli.completion import complete_simulated
from bapipe.cli.options import renamed
from bapipe.cli.values import Counts, Numbers, plain_number
from bapipe.errors import BaPipeError
from bapipe.io.files import write_text
from bapipe.schedule.actions import Schedule
from bapipe.schedule.generators import SCHEDULES, make_schedule, with_recompute, with_update
from bapipe.schedule.inflight import full_overlap_caps
from bapipe.schedule.replicas import replicated
from bapipe.schedule.schedule_file import read_schedule, schedule_text
from bapipe.schedule.v_order import quickest_v_order
from bapipe.schedule.v_shape import V_SHAPED, v_placement
from bapipe.schedule.validate import require_valid
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.lowering import Network
from bapipe.simulator.simulate import simulate
from bapipe.simulator.summary import Summary, summarise
from bapipe.simulator.timeline import Timeline

__all__ = ["simulate_command"]

_MOST_STAGES, _MOST_FORWARDS = 10_000, 4_000_000
_MOST_ORDERED = 2_000
"""forwards up to which V-shaped orders are made for the times that are given"""
_LINKS = {
    "fifo": Network(),
    "half-duplex": Network(duplex="half"),
    "shared": Network(duplex="shared"),
    "latency": Network(latency_only=True),
    "cut-through": Network(sending="cut-through"),
    "after-compute": Network(sending="after-compute"),
    "blocking": Network(sending="blocking"),
}


@click.command("simulate")
@click.argument("schedule", shell_complete=complete_simulated)
@click.option("--stages", "-n", type=int, help="Number of stages N (accelerators, where one has several).")
@renamed("--micro-batches", "-m", "microbatches", type=int, help="Micro-batches per global batch M.")
@click.option("--forward", type=Numbers(), required=True, help="Forward time, one value or one per stage.")
@click.option("--backward", type=Numbers(), required=True, help="Backward time, one value or one per stage.")
@click.option("--transfer", type=Numbers(), default="0", show_default=True, help="Transfer time, one or per link.")
@click.option("--transfer-backward", type=Numbers(), help="The same for gradients.  [default: as --transfer]")
@renamed("--in-flight", "caps", type=Counts(), help="In-flight micro-batches K per stage, for 1f1b and zb.")
@click.option("--replicas", type=Counts(), help="Replicas per stage, such as 3,1.")
@click.option(
    "--virtual",
    type=Counts(),
    default="2",
    show_default=True,
    help="Stages per accelerator (interleaved): of all, or of each, such as 2,2,1; then times are of every stage.",
)
@click.option(
    "--slots", default="table", show_default=True, help="fbp-as: lockstep slots of the paper's table, or static."
)
@click.option("--weight-gradient", type=Numbers(), help="Part of the backward that is W.  [default: half]")
@click.option("--all-reduce", type=Numbers(), help="All-reduce time per stage with replicas.")
@renamed("--optimizer-step", "update", type=Numbers(), help="Time of the optimizer step per stage.")
@click.option("--recompute", is_flag=True, help="Recompute the forward before each backward.")
@click.option(
    "--links", type=click.Choice(list(_LINKS)), default="fifo", show_default=True, help="How links behave."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--svg", "svg_file", type=click.Path(dir_okay=False), help="Draw the timeline into this file.")
@click.option("--trace", "trace_file", type=click.Path(dir_okay=False), help="Write a Chrome/Perfetto trace.")
@click.option(
    "--out", "out_file", type=click.Path(dir_okay=False), help="Write the orders: .json, or torch's .csv."
)
def simulate_command(schedule: str, as_json: bool, **options: Any) -> None:
    """Time one schedule, or compare them all.

    SCHEDULE is gpipe, 1f1b-sno, 1f1b-so, 1f1b (with --in-flight), 1f1b-as, fbp-as, pipedream, interleaved, zb-h1,
    zb-h2, zb (with --in-flight), zb-v, v-half, v-min, dualpipe-v, a schedule file (.json, or torch's .csv), or
    all. Times are in any unit you like.

    \b
    Examples:
      bapipe simulate 1f1b-sno -n 4 -m 16 --forward 10 --backward 20 --transfer 5
      bapipe simulate 1f1b -n 4 -m 16 --in-flight 7,5,3,1 --forward 10 --backward 20 --transfer 5
      bapipe simulate all -n 4 -m 16 --forward 10,12,9,10 --backward 20 --transfer 5 --json
    """
    if schedule == "all":
        _refuse_files(options)
        rows = [one[0] for one in _simulate_all(options)]
        _print_json({"schedules": rows}) if as_json else _print_table(rows, options)
        return
    made = _schedule(schedule, options)
    summary, timeline = _simulate(made, options)
    title = f"{made.name}, {summary.stages} stages, {summary.microbatches} micro-batches"
    files = {}
    if options["svg_file"]:
        from bapipe.reporting.drawing.timeline_svg import render_svg

        files[options["svg_file"]] = render_svg(timeline, title=title)
    if options["trace_file"]:
        from bapipe.reporting.trace import trace_json

        files[options["trace_file"]] = trace_json({title: timeline})
    if options["out_file"]:
        files[options["out_file"]] = schedule_text(made, options["out_file"])
    for file, text in files.items():
        write_text(file, text)
    if as_json:
        _print_json(summary)
    else:
        _print_one(summary, timeline, title)
        for file in files:
            click.echo(f"wrote {file}")


def _refuse_files(options: dict[str, Any]) -> None:
    for name in ("svg_file", "trace_file", "out_file"):
        if options[name]:
            raise BaPipeError("'all' compares schedules and draws none; name one schedule to write a file")
    if options["caps"]:
        raise BaPipeError("--in-flight belongs to the schedule 1f1b, not to 'all'")


def _sizes(options: dict[str, Any]) -> tuple[int, int]:
    for name, parameter in (("stages", "stages"), ("micro-batches", "microbatches")):
        if options[parameter] is None:
            raise BaPipeError(f"--{name} is missing; give a whole number of at least 1")
    stages, microbatches = options["stages"], options["microbatches"]
    ranks = max(stages, sum(options["replicas"] or ()))
    if ranks > _MOST_STAGES:
        raise BaPipeError(
            f"more than {_MOST_STAGES} accelerators cannot be simulated, got {ranks}; lower --stages"
        )
    if stages > 0 and microbatches > 0 and stages * max(1, *options["virtual"]) * microbatches > _MOST_FORWARDS:
        raise BaPipeError(
            f"{stages} stages with {microbatches} micro-batches are more than {_MOST_FORWARDS} forwards; lower one"
        )
    return stages, microbatches


def _v_shaped(made: Schedule, options: dict[str, Any]) -> Schedule:
    """The schedule in an order made for the times, where that does not take long."""
    costs, network = _costs(made, options), _LINKS[options["links"]]
    if made.num_stages * made.num_microbatches > _MOST_ORDERED or network.sending == "blocking":
        return made

    def quickest(microbatches: int) -> Schedule:
        return quickest_v_order(made.name, costs, microbatches, network=network)

    return replicated(made.name, quickest, made.num_microbatches, options["replicas"])


def _schedule(name: str, options: dict[str, Any]) -> Schedule:
    if name.endswith((".json", ".csv")) or os.sep in name:
        made = read_schedule(Path(name))
        sizes = (("stages", made.num_stages), ("micro-batches", made.num_microbatches))
        for option, got in sizes:
            given = options[option.replace("-", "")]
            if given not in (None, got):
                raise BaPipeError(f"{name} has {got} {option}, but --{option} says {given}; drop it")
        require_valid(made)
    else:
        stages, microbatches = _sizes(options)
        made = make_schedule(
            name,
            stages,
            microbatches,
            caps=options["caps"],
            replicas=options["replicas"],
            virtual=options["virtual"][0] if len(options["virtual"]) == 1 else options["virtual"],
            slots=options["slots"],
        )
        if name in V_SHAPED:
            made = _v_shaped(made, options)
    if options["recompute"]:
        made = with_recompute(made)
    if options["all_reduce"] or options["update"]:
        made = with_update(made)
    return made


def _costs(made: Schedule, options: dict[str, Any]) -> Costs:
    placement = _of_one_pipeline(made)
    ranks = 1 + max(rank for own in placement for rank in own)
    dealt = tuple((stage % ranks,) for stage in range(made.num_stages))
    interleaved = made.num_stages != ranks and placement == dealt
    given = (options[name] for name in ("forward", "backward", "weight_gradient"))
    by_rank = not any(isinstance(value, Sequence) and len(value) == made.num_stages for value in given)
    shaped = made.name in V_SHAPED or (ranks > 1 and placement == v_placement(ranks))
    folds = shaped and by_rank
    count = ranks if interleaved or folds else made.num_stages
    costs = Costs.of(
        count,
        forward=options["forward"],
        backward=options["backward"],
        transfer=options["transfer"],
        transfer_backward=options["transfer_backward"],
        weight_gradient=options["weight_gradient"],
        all_reduce=options["all_reduce"] or 0.0,
        update=options["update"] or 0.0,
    )
    if folds:
        return costs.folded()
    return costs.split(made.num_stages // ranks) if interleaved else costs


def _of_one_pipeline(made: Schedule) -> tuple[tuple[int, ...], ...]:
    """The ranks of each stage; of replicas of a whole pipeline, those of one."""
    count = len(made.placement[0])
    if any(len(own) != count for own in made.placement):
        return made.placement
    return tuple((own[0] // count,) for own in made.placement)


def _simulate(made: Schedule, options: dict[str, Any]) -> tuple[Summary, Timeline]:
    costs, network = _costs(made, options), _LINKS[options["links"]]
    timeline = simulate(made, costs, network)
    summary = summarise(made, costs, timeline, network)
    ranks = 1 + max(rank for own in _of_one_pipeline(made) for rank in own)
    several = made.name in ("interleaved", *V_SHAPED)
    return dataclasses.replace(summary, stages=ranks if several else summary.stages), timeline


def _simulate_all(options: dict[str, Any]) -> list[tuple[Summary, Timeline]]:
    stages, microbatches = _sizes(options)
    results = []
    replicas = options["replicas"] or (1,)
    replicated = max(replicas) > 1
    whole = ("zb-h1", "zb-h2", "interleaved", *V_SHAPED) if len(set(replicas)) == 1 else ()
    able = ("gpipe", "1f1b-sno", "1f1b-so", *whole)
    for name in SCHEDULES:
        if (replicated and name not in able) or name in _left_out(options):
            continue
        results.append(_simulate(_schedule(name, options), options))
    if not replicated:
        costs = _costs(make_schedule("1f1b-sno", stages, microbatches), options)
        sends: Sequence[Sequence[float]] = (costs.send_forward, costs.send_backward)
        lean = full_overlap_caps(costs.forward, costs.backward, *sends)
        lean_options = {**options, "caps": lean}
        results.insert(3, _simulate(_schedule("1f1b", lean_options), options))
        results.append(_simulate(_schedule("zb", lean_options), options))
    return results


def _left_out(options: dict[str, Any]) -> tuple[str, ...]:
    """Schedules that these links cannot run: with two lanes, endless, or ahead of what blocking sends allow."""
    return ("fbp-as", "pipedream", "interleaved", *V_SHAPED) if options["links"] == "blocking" else ()


def _print_json(value: Any) -> None:
    def plain(item: Any) -> Any:
        return dataclasses.asdict(item) if isinstance(item, Summary) else item

    if isinstance(value, dict):
        value = {key: [plain(item) for item in items] for key, items in value.items()}
    click.echo(json.dumps(plain_number(plain(value)), indent=1, allow_nan=False))


def _figures(summary: Summary) -> list[tuple[str, str]]:
    form = "none for this case"
    if summary.closed_form is not None:
        range_text = "holds here" if summary.closed_form_valid else "does not hold here"
        form = f"{summary.closed_form:g} ({range_text}: {summary.closed_form_condition})"
    rows = [
        ("time", f"{summary.time:g}"),
        ("closed form", form),
        ("bubble", f"{summary.bubble:.1%}"),
        ("in-flight at the peak", _listed(summary.peak_activations) + " micro-batches"),
        ("weights memory", _listed(summary.weights_memory) + " × the weights of a stage"),
        ("waits for transfers", _listed(summary.exposed_communication) + " on each rank"),
        ("bandwidth to hide transfers", f"{summary.bandwidth_demand:.4g} transfers per unit of time"),
    ]
    if summary.period is not None:
        rows.insert(1, ("steady period", f"{summary.period:g} per global batch; the pipeline never flushes"))
    if summary.caps is not None:
        rows.append(("in-flight limit K", _listed(summary.caps)))
    if summary.slots is not None:
        rows.append(("slot rule", summary.slots))
    if summary.span < summary.makespan * (1 - 1e-9):
        rows.append(("longest span of a rank", f"{summary.span:g}"))
    return rows


def _listed(values: Sequence[float]) -> str:
    shown = [f"{value:g}" for value in values]
    return " ".join(shown if len(shown) <= 16 else [*shown[:8], "…", *shown[-4:]])


def _print_one(summary: Summary, timeline: Timeline, title: str) -> None:
    from bapipe.reporting.terminal.console import terminal
    from bapipe.reporting.terminal.timeline_text import render_text

    console = terminal()
    console.print(render_text(timeline, width=console.width, color=console.is_terminal, title=title))
    console.print()
    for name, value in _figures(summary):
        console.print(f"{name:<28} {value}", soft_wrap=True)


def _print_table(rows: list[Summary], options: dict[str, Any]) -> None:
    from rich.table import Table

    from bapipe.reporting.terminal.console import terminal

    console = terminal()
    best = min(row.time for row in rows)
    table = Table(
        title=f"{options['stages']} stages, {options['microbatches']} micro-batches", title_justify="left"
    )
    for header in ("schedule", "time", "relative", "bubble", "closed form", "in flight", "weights"):
        named = header == "schedule"
        table.add_column(header, justify="left" if named else "right", no_wrap=named, overflow="fold")
    for row in sorted(rows, key=lambda row: row.time):
        form = (
            "–" if row.closed_form is None else f"{row.closed_form:g}{'' if row.closed_form_valid else ' (n/a)'}"
        )
        table.add_row(
            row.schedule + (" (least K)" if row.schedule in ("1f1b", "zb") else ""),
            f"{row.time:g}",
            f"{best / row.time:.3f}x",
            f"{row.bubble:.1%}",
            form,
            f"{max(row.peak_activations):g}",
            f"{max(row.weights_memory):g}",
        )
    console.print(table)
    console.print(
        "relative: throughput over the best row's; in flight: micro-batches on the fullest accelerator; weights: "
        "held there, in those of a stage; least K: the fewest in flight that hide the transfers; (n/a): outside "
        "the formula's range.\n"
        "1f1b-as and fbp-as assume links that send while computing (FPGA); pipedream never flushes and "
        "trains with stale weights.",
        soft_wrap=True,
    )
    if _left_out(options):
        console.print(f"Left out, as they cannot run with blocking sends: {', '.join(_left_out(options))}.")
