"""A plan for FPGAs in the terminal: what each board computes, holds and sends, and what binds it."""

from __future__ import annotations

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bapipe.records.fpga_deployment import BoardDeployment, Deployment
from bapipe.records.plan import Plan
from bapipe.reporting.terminal.plan_table import answer, render_alternatives, stage_layers
from bapipe.units import format_bytes, format_seconds

__all__ = ["render_assumptions", "render_fpga"]

_MOST_SPILLS = 3


def render_fpga(plan: Plan, *, alternatives: int = 8) -> RenderableType:
    """The answer, what each board computes, what it holds and sends, spills, alternatives and notes."""
    deployment = plan.deployment
    assert deployment is not None, "only plans for FPGAs have a deployment"
    interval = deployment.boards[0].interval
    parts: list[RenderableType] = [
        Text(answer(plan), style="bold"),
        Text(f"interval {format_seconds(interval)} per image on every board, set by {deployment.binds}"),
        _compute(plan, deployment),
        _resources(deployment),
        _memory(deployment),
        *(Text(f"· {line}") for line in _spills(deployment)),
        render_alternatives(plan, alternatives),
        *(Text(f"· {note}") for note in plan.notes),
    ]
    return Group(*parts)


def _table(title: str, left: Iterable[str], right: Iterable[str]) -> Table:
    """A table with `left` columns, which wrap, and figures."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    table.add_column("#", justify="right", no_wrap=True)
    for header in left:
        table.add_column(header, overflow="fold", min_width=len(header))
    for header in right:
        table.add_column(header, justify="right", no_wrap=True)
    return table


def _compute(plan: Plan, deployment: Deployment) -> Table:
    table = _table(
        "seconds per image: C of the DSPs, D of the DDR, ρ = D/C",
        ("board", "layers", "binds"),
        ("C", "D", "ρ"),
    )
    for index, (stage, board) in enumerate(zip(plan.stages, deployment.boards, strict=True)):
        table.add_row(
            str(index),
            f"{board.accelerator} {board.type}",
            stage_layers(stage),
            board.binds,
            format_seconds(board.compute),
            format_seconds(board.ddr) if board.ddr else "–",
            f"{board.ratio:.2f}",
        )
    return table


def _resources(deployment: Deployment) -> Table:
    table = _table(
        "DSPs by module, their efficiency in the interval, and bandwidth used",
        (),
        ("FP", "EB", "WG", "of", "eff.", "DDR GB/s", "of", "Gb/s back", "Gb/s on", "of"),
    )
    for index, board in enumerate(deployment.boards):
        dsps = (board.dsp_forward, board.dsp_error, board.dsp_gradient, board.dsp_installed)
        table.add_row(
            str(index),
            *(f"{value:.0f}" for value in dsps),
            f"{board.efficiency:.0%}",
            f"{board.ddr_rate / 1e9:.1f}",
            f"{board.ddr_bandwidth / 1e9:.0f}",
            _rate(board, deployment, index - 1),
            _rate(board, deployment, index + 1),
            "/".join(dict.fromkeys(f"{use.bandwidth * 8e-9:.0f}" for use in board.links)) or "–",
        )
    return table


def _megabytes(value: float) -> str:
    return f"{value / 1e6:.1f}" if value else "–"


def _memory(deployment: Deployment) -> Table:
    table = _table(
        "MB on chip, and in DDR",
        (),
        ("weights", "gradients", "activations", "hosted", "FIFOs", "free", "usable", "in DDR"),
    )
    for index, board in enumerate(deployment.boards):
        used = (
            board.ram_weights, board.ram_gradients, board.ram_features, board.ram_hosted, board.ram_buffers,
        )  # fmt: skip
        free = max(0.0, board.ram_usable - sum(used))
        values = (*used, free if free > 5e4 else 0.0, board.ram_usable, board.ddr_used)
        table.add_row(str(index), *(_megabytes(value) for value in values))
    return table


def _rate(board: BoardDeployment, deployment: Deployment, other: int) -> str:
    """Gb/s to a neighbour, parked weights included."""
    if not 0 <= other < len(deployment.boards):
        return "–"
    name = deployment.boards[other].accelerator
    return f"{sum(use.rate for use in board.links if use.to == name) * 8e-9:.1f}"


def _spills(deployment: Deployment) -> Iterable[str]:
    """What lies in DDR or with a neighbour, the largest first."""
    for board in deployment.boards:
        away = sorted(
            (item for item in board.placed if item.where != "on-chip"), key=lambda item: item.bytes, reverse=True
        )
        if not away:
            continue
        shown = [
            f"{item.words} of {item.layer} {format_bytes(item.bytes)}"
            + ("" if item.where == "ddr" else f" (on {item.where})")
            for item in away[:_MOST_SPILLS]
        ]
        rest = len(away) - _MOST_SPILLS
        more = f" and {rest} more" if rest > 0 else ""
        yield f"{board.accelerator} spills {', '.join(shown)}{more}"


def render_assumptions(plan: Plan) -> Table:
    """Every assumption with its value and source, for --explain."""
    deployment = plan.deployment
    assert deployment is not None, "only plans for FPGAs have a deployment"
    table = Table(title="assumptions", title_justify="left")
    for header in ("name", "value", "source"):
        table.add_column(header, overflow="fold", no_wrap=header == "name")
    for name, text in deployment.assumptions.items():
        value, _, source = text.partition(": ")
        table.add_row(name, value, source)
    return table
