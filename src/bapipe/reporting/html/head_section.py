"""The head of the report: what to run, how fast it is, and why not another way."""

from __future__ import annotations

from bapipe.analysis.predicted_measured import Comparison, Pair
from bapipe.records.plan import Plan
from bapipe.reporting.charts.frame import safe
from bapipe.reporting.html.elements import counted, figure, seconds, share, time_range
from bapipe.reporting.terminal.plan_table import answer, shape
from bapipe.units import format_throughput

__all__ = ["head_section", "prediction_error", "why_not_the_others"]


def head_section(plan: Plan, found: Comparison | None) -> str:
    """What to run and how fast: measured first, where there is a run, then predicted with the difference."""
    prediction = plan.prediction
    sentence = f"Run {answer(plan).removeprefix(f'{plan.model.name}: ')}."
    tiles = [
        ("throughput", "throughput", _samples(prediction.throughput)),
        ("time per global batch", "time", time_range(prediction)),
        ("over the lower bound", "gap", share(prediction.gap)),
        ("lower bound", "lower_bound", seconds(prediction.lower_bound)),
        ("bubble", "bubble", share(prediction.bubble)),
        ("longest wait for transfers", "exposed_communication", seconds(prediction.exposed_communication)),
    ]
    if found is not None:
        # The whole step, synchronisation of the ranks included: what a training run gets.
        rate = Pair(predicted=prediction.throughput, measured=plan.global_batch / found.step.measured)
        off = "" if rate.error is None else f" ({rate.error:+.0%})"
        sentence = (
            f"{format_throughput(rate.measured)} samples/s measured, {format_throughput(rate.predicted)} predicted"
            f"{off}: {shape(plan)}, global batch {plan.global_batch}."
        )
        tiles[:2] = [
            ("measured throughput", "measured_throughput", _samples(rate.measured)),
            ("predicted throughput", "throughput", _samples(rate.predicted) + prediction_error(rate)),
            ("measured time per global batch", "measured", seconds(found.step.measured)),
            ("predicted time", "time", time_range(prediction) + prediction_error(found.step)),
        ]
    shown = "".join(f'<div><dt>{name}</dt><dd id="figure-{key}">{value}</dd></div>' for name, key, value in tiles)
    source = (
        "a measured profile" if prediction.source == "measured" else f"{prediction.source} times, not measured"
    )
    badge = f"predicted from {source}"
    return (
        f'<header><h1>{safe(plan.model.name, 80)}</h1><p class="answer" id="answer">{safe(sentence, 400)}</p>'
        f'<p id="why">{safe(why_not_the_others(plan), 500)} <span class="badge">{safe(badge, 80)}</span></p>'
        f'<dl class="tiles">{shown}</dl></header>'
    )


def _samples(rate: float) -> str:
    return figure(rate, format_throughput(rate)) + ' <span class="unit">samples/s</span>'


def why_not_the_others(plan: Plan) -> str:
    """The fastest alternative and why it lost, and how many do not fit."""
    timed = [alternative for alternative in plan.alternatives if alternative.time is not None]
    misfits = len(plan.alternatives) - len(timed)
    if not plan.alternatives:
        return "No alternative was considered."
    none = f"{'it does' if misfits == 1 else 'they do'} not fit"
    if not timed:
        return f"Of {counted(len(plan.alternatives), 'alternative')} none is possible: {none}."
    nearest = min(timed, key=lambda alternative: alternative.time or 0.0)
    tail = "" if not misfits else f" {counted(misfits, 'alternative')} would not fit."
    return (
        f"The fastest of {counted(len(plan.alternatives), 'alternative')}, {nearest.name}: {nearest.reason}.{tail}"
    )


def prediction_error(pair: Pair) -> str:
    """By how much the prediction is over or under what was measured."""
    if pair.error is None:
        return ""
    return f' <span class="error">({pair.error:+.0%})</span>'
