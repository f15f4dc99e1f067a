"""What `bapipe plan` does where every accelerator is an FPGA."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import click

from bapipe.cli.plan_values import flat_plan
from bapipe.cli.values import plain_number
from bapipe.errors import BaPipeError, InfeasibleError
from bapipe.fpga import FPGA_STRATEGIES, explore_fpga, make_fpga_plan, parse_assumptions
from bapipe.hardware.cluster import Cluster
from bapipe.models.layers import Model
from bapipe.models.model_spec import model_ref, parse_model_spec
from bapipe.planner import Request
from bapipe.planner.inputs import layers_for_fpgas
from bapipe.records.plan import Plan, write_plan
from bapipe.units import format_seconds

__all__ = ["plan_on_fpgas", "read_cnn"]


def read_cnn(spec: str) -> Model:
    """The layer table that MODEL names: built-in, a TOML file, or a PyTorch model, which is captured, not run."""
    found = parse_model_spec(spec)
    if found.kind in ("builtin", "layer table"):
        return layers_for_fpgas(found.text)
    if found.kind == "code":
        from bapipe.torch.capturing import capture
        from bapipe.torch.inputs.build_model import build_model

        built = build_model(model_ref(found.text))
        return capture(built.module, built.args, built.kwargs, check=False).to_model(built.model.name)
    raise BaPipeError(
        f"FPGAs take a built-in CNN, a layer table (.toml) or package.module:function, got '{found.text[:60]}'"
    )


def plan_on_fpgas(model: str, cluster: Cluster, request: Request, options: dict[str, Any]) -> None:
    """Plan, write and show, as the options say."""
    if options["compare"]:
        _compare(model, cluster, request, options)
        return
    plan, steps = _plan(model, cluster, request, options)
    if options["out"]:
        write_plan(plan, options["out"])
    written: list[str] = []
    if options["report"]:
        from bapipe.reporting.html.write_report import write_report

        written = write_report(plan, options["report"], steps=steps)
    if options["as_json"]:
        click.echo(json.dumps(plain_number(_summary(plan, options)), indent=1, allow_nan=False))
        return
    from bapipe.reporting.terminal.console import terminal
    from bapipe.reporting.terminal.fpga_table import render_assumptions, render_fpga
    from bapipe.reporting.terminal.plan_table import render_steps

    console = terminal()
    console.print(render_fpga(plan))
    if options["explain"]:
        console.print(render_steps(steps))
        console.print(render_assumptions(plan))
    if options["dataset_size"]:
        epoch = options["dataset_size"] / plan.prediction.throughput
        console.print(f"one epoch of {options['dataset_size']} samples: {format_seconds(epoch)}")
    if options["out"]:
        console.print(f"wrote {options['out']}", soft_wrap=True)
    for line in written:
        console.print(line, soft_wrap=True)


def _plan(model: str, cluster: Cluster, request: Request, options: dict[str, Any]) -> tuple[Plan, tuple[Any, ...]]:
    parameters = parse_assumptions(options["assume"])
    cnn, dtype = read_cnn(model), options["dtype"]
    found = explore_fpga(cnn, cluster, request, dtype=dtype, parameters=parameters)
    steps = found.steps
    if options["explain"] and not steps:
        again = dataclasses.replace(request, strategy="bapipe", schedule=found.best.rule.schedule)
        steps = explore_fpga(cnn, cluster, again, dtype=dtype, parameters=parameters).steps
    return make_fpga_plan(found), steps


def _summary(plan: Plan, options: dict[str, Any]) -> dict[str, Any]:
    deployment = dataclasses.asdict(plan.deployment) if plan.deployment else None
    return {**flat_plan(plan, dataset_size=options["dataset_size"]), "deployment": deployment}


def _compare(model: str, cluster: Cluster, request: Request, options: dict[str, Any]) -> None:
    rows: list[dict[str, Any]] = []
    for strategy in FPGA_STRATEGIES:
        try:
            plan, _ = _plan(model, cluster, dataclasses.replace(request, strategy=strategy), options)
        except InfeasibleError as error:
            rows.append({"strategy": strategy, "time": None, "reason": str(error)})
            continue
        assert plan.deployment is not None
        rows.append(
            {
                "strategy": strategy,
                "schedule": plan.schedule.name,
                "microbatch_size": plan.microbatch_size,
                "stages": len(plan.stages),
                "time": plan.prediction.time,
                "gap": plan.prediction.gap,
                "binds": plan.deployment.binds,
            }
        )
    if options["as_json"]:
        click.echo(json.dumps(plain_number({"model": model, "strategies": rows}), indent=1))
        return
    from rich.table import Table

    from bapipe.reporting.terminal.console import terminal

    table = Table(title=f"{model}: strategies by the same model", title_justify="left")
    for header in ("strategy", "plan", "time", "over bound", "set by"):
        table.add_column(header, justify="right" if header in ("time", "over bound") else "left")
    for row in rows:
        if row["time"] is None:
            table.add_row(row["strategy"], "does not fit", "–", "–", "–")
            continue
        shape = f"{row['schedule']}, {row['stages']} stages, b={row['microbatch_size']}"
        table.add_row(row["strategy"], shape, format_seconds(row["time"]), f"{row['gap']:.1%}", row["binds"])
    terminal().print(table)
