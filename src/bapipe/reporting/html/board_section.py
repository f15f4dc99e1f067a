"""The boards of an FPGA plan as a section of the report: what each computes with, holds and sends."""

from __future__ import annotations

from bapipe.records.fpga_deployment import BoardDeployment, Deployment
from bapipe.records.plan import Plan
from bapipe.reporting.charts.frame import safe
from bapipe.reporting.html.elements import figure, seconds, section, share, size, table

__all__ = ["MOST_PLACED", "boards_section"]

MOST_PLACED = 200
"""rows of what lies outside of its board's chip; further ones are counted"""


def boards_section(plan: Plan) -> str:
    """The section of a plan for FPGAs; empty for other accelerators."""
    deployment = plan.deployment
    if deployment is None:
        return ""
    words = (
        f"<p>Every board takes {seconds(deployment.boards[0].interval)} per image, set by "
        f"{safe(deployment.binds, 80)}.</p>"
    )
    return section(
        "boards",
        "Boards",
        words,
        _compute(deployment),
        _on_chip(deployment),
        _placed(deployment),
        _assumptions(deployment),
    )


def _whole(value: float) -> str:
    return figure(value, f"{value:.0f}")


def _compute(deployment: Deployment) -> str:
    rows = []
    for number, board in enumerate(deployment.boards):
        used = board.dsp_forward + board.dsp_error + board.dsp_gradient
        rows.append(
            [
                str(number),
                f"{safe(board.accelerator, 40)} {safe(board.type, 40)}",
                safe(board.binds, 60),
                seconds(board.compute),
                seconds(board.ddr),
                *(_whole(dsps) for dsps in (board.dsp_forward, board.dsp_error, board.dsp_gradient)),
                share(used / board.dsp_installed),
                share(board.efficiency),
                share(board.ddr_rate / board.ddr_bandwidth if board.ddr_bandwidth else 0.0),
                _busiest(board),
            ]
        )
    headers = [
        "stage", "board", "bound by", "DSP time", "DDR time", "DSPs forward", "error", "gradient", "of all DSPs",
        "DSP efficiency", "of DDR rate", "busiest link",
    ]  # fmt: skip
    return table("boards", headers, rows, words=3)


def _busiest(board: BoardDeployment) -> str:
    """How much of its bandwidth the link has to carry that the board fills most."""
    sent: dict[str, float] = {}
    width = {use.to: use.bandwidth for use in board.links}
    for use in board.links:
        sent[use.to] = sent.get(use.to, 0.0) + use.rate
    if not sent:
        return "–"
    to = max(sent, key=lambda name: sent[name] / width[name])
    return f"{share(sent[to] / width[to])} to {safe(to, 40)}"


def _on_chip(deployment: Deployment) -> str:
    rows = []
    for number, board in enumerate(deployment.boards):
        held = (
            board.ram_weights, board.ram_gradients, board.ram_features, board.ram_hosted, board.ram_buffers,
        )  # fmt: skip
        filled = sum(held) / board.ram_usable if board.ram_usable else 0.0
        rows.append(
            [
                str(number),
                *(size(value) if value else "–" for value in held),
                size(board.ram_usable),
                share(filled),
                size(board.ddr_used) if board.ddr_used else "–",
                size(board.ddr_installed) if board.ddr_installed else "–",
            ]
        )
    headers = [
        "stage", "weights on chip", "gradients", "activations", "neighbours' weights", "FIFOs", "usable", "filled",
        "in DDR", "of DDR",
    ]  # fmt: skip
    return table("on-chip", headers, rows)


def _placed(deployment: Deployment) -> str:
    away = [
        [safe(board.accelerator, 40), item.words, safe(item.layer, 48), safe(item.where, 40), size(item.bytes)]
        for board in deployment.boards
        for item in sorted(board.placed, key=lambda item: -item.bytes)
        if item.where != "on-chip"
    ]
    if not away:
        return "<p>All weights, gradients and activations lie on the chips.</p>"
    more = f"<p>and {len(away) - MOST_PLACED} more in plan.json</p>" if len(away) > MOST_PLACED else ""
    shown = table("spilled", ["board", "what", "of layer", "lies in", "bytes"], away[:MOST_PLACED], words=4)
    return f"<details><summary>{len(away)} pieces lie outside of their chip</summary>{shown}{more}</details>"


def _assumptions(deployment: Deployment) -> str:
    rows = []
    for name, text in deployment.assumptions.items():
        value, _, source = text.partition(": ")
        rows.append([safe(name, 60), safe(value, 80), safe(source, 300)])
    shown = table("assumptions", ["name", "value", "source"], rows, words=3)
    return f"<details><summary>{len(rows)} assumptions of the FPGA model</summary>{shown}</details>"
