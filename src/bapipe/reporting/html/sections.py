"""The report's sections as HTML: words, tables and charts of a plan, each from pure data.

Every figure stands in a <data> element whose value is the exact number; its text is that number for people. All
text that comes from a model or a file is escaped and cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from bapipe.analysis.predicted_measured import Comparison, MemoryPair, Pair
from bapipe.planner.partition.paper.step_record import Step
from bapipe.records.plan import Alternative, MemoryParts, Plan, PlanStage
from bapipe.reporting.charts.alternatives import alternatives_chart, pareto_front
from bapipe.reporting.charts.balance import balance_chart, balance_of
from bapipe.reporting.charts.frame import Chart, safe
from bapipe.reporting.charts.layer_costs import layers_chart, stages_chart
from bapipe.reporting.charts.rank_memory import memory_chart
from bapipe.reporting.html.board_section import boards_section
from bapipe.reporting.html.elements import (
    counted,
    figure,
    picture,
    seconds,
    section,
    share,
    size,
    table,
    time_range,
)
from bapipe.reporting.html.head_section import head_section, prediction_error
from bapipe.reporting.views.cut_links import cut_links
from bapipe.reporting.views.layer_view import LayerView
from bapipe.reporting.views.memory_view import MemoryView
from bapipe.simulator.timeline import Timeline

__all__ = ["MOST_ROWS", "Subject", "charts_of", "sections_html", "timeline_section"]

_PARTS = {"activations": "saved activations"}
"""heads of columns that differ from the plan's keys"""
MOST_ROWS = 200
"""rows of a table; further layers or alternatives are counted, not listed"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subject:
    """What a report is about, worked out once for all its sections."""

    plan: Plan
    predicted: Timeline
    memory: MemoryView
    layers: LayerView | None = None
    """None: the profile is not at hand"""
    steps: tuple[Step, ...] = ()
    """of the exploration, where they are known"""
    comparison: Comparison | None = None
    """None: nothing was run"""


def charts_of(subject: Subject) -> list[Chart]:
    """Every picture but the timeline."""
    plan, found = subject.plan, subject.comparison
    measured = None if found is None else balance_of(plan, found.measured)
    return [
        balance_chart(balance_of(plan, subject.predicted), measured=measured),
        memory_chart(subject.memory, time=subject.predicted.makespan),
        stages_chart(plan) if subject.layers is None else layers_chart(subject.layers),
        alternatives_chart(plan),
    ]


def sections_html(subject: Subject) -> str:
    """All sections in order; the timeline's canvas is empty until the page's script draws it."""
    charts = {chart.name: chart for chart in charts_of(subject)}
    parts = [
        head_section(subject.plan, subject.comparison),
        _timeline(subject),
        _balance(subject, charts["balance"]),
        _memory(subject, charts["memory"]),
        boards_section(subject.plan),
        _layers(subject, charts["layers"]),
        _alternatives(subject.plan, charts["alternatives"]),
        _exploration(subject),
        _comparison(subject),
        _about(subject.plan),
    ]
    return "\n".join(part for part in parts if part)


def _timeline(subject: Subject) -> str:
    both = (("both", "predicted and measured"), ("predicted", "predicted"), ("measured", "measured"))
    return timeline_section(subject.plan.microbatches, choices=() if subject.comparison is None else both)


def timeline_section(microbatches: int, *, choices: Sequence[tuple[str, str]] = (), more: str = "") -> str:
    """The timeline's canvas and controls; `choices` are what can be shown, `more` stands above it."""
    options = "".join(f'<option value="{value}">{words}</option>' for value, words in choices)
    shown = f'<label>show <select id="timeline-shown">{options}</select></label>' if choices else ""
    return section(
        "timeline",
        "Timeline",
        '<div class="controls" id="timeline-controls">'
        '<span class="buttons"><button type="button" id="zoom-in" aria-label="zoom in">+</button>'
        '<button type="button" id="zoom-out" aria-label="zoom out">−</button>'
        '<button type="button" id="zoom-all">whole</button></span>'
        f"{shown}"
        '<label>micro-batch <input id="highlight" type="number" min="0" '
        f'max="{microbatches - 1}" placeholder="all"></label></div>{more}',
        '<div id="timeline-view" class="view" tabindex="0" role="application" aria-label="pipeline timeline" '
        'aria-describedby="timeline-keys"><canvas id="timeline-canvas"></canvas>'
        '<div id="tip" class="tip" hidden></div></div>',
        '<output id="readout" class="readout" aria-live="polite">Point at an action, or press the arrow keys.'
        "</output>",
        '<div id="timeline-legend" class="legend"></div>',
        '<p class="soft" id="merged" hidden>Actions too narrow to be seen are merged: heights are shares of the '
        "time. Zoom in to see each.</p>",
        '<p class="soft" id="timeline-keys">Drag to pan, Ctrl and wheel or pinch to zoom, click to follow a '
        f"micro-batch. Keys: {_keys()}.</p>",
        "<noscript><p>The timeline needs JavaScript; everything else is here.</p></noscript>",
    )


def _keys() -> str:
    """The timeline's keys and what they do; no line breaks within one."""
    keys = (
        ("← →", "pan"),
        ("+ −", "zoom"),
        ("0", "whole"),
        ("↑ ↓", "rank"),
        (", .", "previous and next action"),
        ("Esc", "clear"),
    )
    shown = []
    for pressed, done in keys:
        caps = " ".join(f"<kbd>{key}</kbd>" for key in pressed.split())
        shown.append(f'<span class="whole">{caps} {done}</span>')
    return ", ".join(shown)


def _layer_range(stage: PlanStage) -> str:
    if len(stage.layers) == 1:
        return f"{stage.first_layer} {safe(stage.layers[0], 48)}"
    names = f"{safe(stage.layers[0], 32)} … {safe(stage.layers[-1], 32)}"
    return f"{stage.first_layer}–{stage.last_layer} {names}"


def _balance(subject: Subject, chart: Chart) -> str:
    plan, timeline = subject.plan, subject.predicted
    busy, exposed, time = timeline.busy(), timeline.exposed_communication(), timeline.time
    rank_of = {name: rank for rank, name in enumerate(plan.ranks)}
    balance = balance_of(plan, timeline)
    slowest = max(range(len(plan.stages)), key=balance.totals.__getitem__)
    rows = []
    for number, stage in enumerate(plan.stages):
        rank = rank_of[stage.accelerators[0]]
        more = "" if len(stage.accelerators) == 1 else f" … ×{len(stage.accelerators)}"
        rows.append(
            [
                str(number),
                safe(stage.accelerators[0]) + more,
                _layer_range(stage) + (f" ({stage.recomputed})" if stage.recomputed else ""),
                seconds(stage.forward),
                seconds(stage.backward),
                figure(stage.in_flight, f"{stage.in_flight:g}"),
                share(busy[rank] / time if time > 0 else 0.0),
                seconds(exposed[rank]),
            ]
        )
        for name, own in zip(stage.accelerators, stage.replicas or (), strict=False):
            rank = rank_of[name]
            rows.append(
                [
                    str(number),
                    safe(name),
                    f"{own.microbatches} of {plan.microbatches} micro-batches",
                    seconds(own.forward),
                    seconds(own.backward),
                    figure(own.in_flight, f"{own.in_flight:g}"),
                    share(busy[rank] / time if time > 0 else 0.0),
                    seconds(exposed[rank]),
                ]
            )
    headers = ["stage", "on", "layers", "forward", "backward", "in flight", "busy", "waits"]
    words = (
        f"Stage {slowest} is the slowest; the stages' mean is {balance.mean_over_slowest:.1%} of it, "
        "where 100% is perfect balance."
    )
    return section(
        "balance", "Stage balance", f"<p>{words}</p>", picture(chart), table("stages", headers, rows, words=3)
    )


def _memory(subject: Subject, chart: Chart) -> str:
    rows = []
    for number, stage in enumerate(subject.plan.stages):
        rank = next(rank for rank in subject.memory.ranks if number in rank.stages)
        parts = rank.parts
        rows.append(
            [
                str(number),
                size(stage.memory_bytes),
                size(stage.memory_capacity),
                size(parts.weights),
                size(parts.gradients),
                size(parts.optimizer),
                size(parts.activations),
                size(parts.buffers),
                size(parts.workspace),
            ]
        )
    headers = ["stage", "peak", "capacity", *(_PARTS.get(field.name, field.name) for field in fields(MemoryParts))]
    shared = any(len(rank.stages) > 1 for rank in subject.memory.ranks)
    words = "<p>The parts are those of the peak of the stage's whole rank.</p>" if shared else ""
    return section("memory", "Memory", picture(chart), words, table("memory", headers, rows))


def _layers(subject: Subject, chart: Chart) -> str:
    view = subject.layers
    if view is None:
        words = (
            "<p>plan.json holds the stages' sums; <code>bapipe report plan.json --profile profile.json</code> "
            "shows every layer.</p>"
            if subject.plan.deployment is None
            else "<p>The sums of the stages; plan.json lists the modules of every layer.</p>"
        )
        return section("layers", "Layers and cuts", words, picture(chart), _cut_table(subject.plan))
    rows = [
        [
            str(layer.index),
            safe(layer.name, 48),
            ", ".join(str(stage) for stage in layer.stages),
            seconds(layer.forward),
            seconds(layer.backward),
            size(layer.weight_bytes),
            size(layer.boundary_forward),
            size(layer.saved),
        ]
        for layer in view.layers[:MOST_ROWS]
    ]
    headers = ["layer", "name", "stage", "forward", "backward", "weights", "would cross", "kept for backward"]
    more = len(view.layers) - len(rows)
    tail = f"<p>and {counted(more, 'more layer')}</p>" if more else ""
    details = (
        f"<details><summary>{counted(len(view.layers), 'layer')} in figures</summary>"
        f"{table('layer', headers, rows, words=3)}{tail}</details>"
    )
    return section("layers", "Layers and cuts", picture(chart), _cut_table(subject.plan), details)


def _cut_table(plan: Plan) -> str:
    rows = [
        [
            f"{number} → {number + 1}",
            safe(stage.layers[-1], 48),
            size(stage.send_forward_bytes),
            size(plan.stages[number + 1].send_backward_bytes),
        ]
        for number, stage in enumerate(plan.stages[:-1])
    ]
    headers = ["cut", "after", "sends forward", "sends back"]
    links = cut_links(plan)
    if links:
        headers.insert(2, "link")
        for row, link in zip(rows, links, strict=True):
            row.insert(2, safe(link.words, 80))
    return table("cuts", headers, rows, words=3 if links else 2) if rows else ""


def _alternatives(plan: Plan, chart: Chart) -> str:
    memory = max(stage.memory_bytes for stage in plan.stages)
    everyone = [
        Alternative(
            name=f"{plan.schedule.name} (this plan)",
            time=plan.prediction.time,
            memory_bytes=memory,
            reason="",
            low=plan.prediction.low,
            high=plan.prediction.high,
        ),
        *plan.alternatives,
    ]
    timed = [number for number, alternative in enumerate(everyone) if alternative.time is not None]
    points = [(everyone[number].time or 0.0, everyone[number].memory_bytes) for number in timed]
    front = {timed[index] for index in pareto_front(points)}
    rows = [
        [
            str(number),
            safe(alternative.name, 80),
            safe(alternative.reason, 160),
            time_range(alternative),
            size(alternative.memory_bytes),
            "✓" if number in front else "",
        ]
        for number, alternative in enumerate(everyone[: MOST_ROWS + 1])
    ]
    more = len(everyone) - len(rows)
    tail = f"<p>and {counted(more, 'more alternative')} in plan.json</p>" if more else ""
    if any(note.startswith("space of the paper") for note in plan.notes):
        tail += (
            "<p>In the space of the paper data parallelism steps the optimizer after fewer samples: its time "
            "is of its own global batch, and the reason compares throughput.</p>"
        )
    headers = ["#", "way", "why not", "time", "memory", "Pareto"]
    return section(
        "alternatives", "Alternatives", picture(chart), table("alternatives", headers, rows, words=3), tail
    )


def _exploration(subject: Subject) -> str:
    notes = "".join(f"<li>{safe(note, 300)}</li>" for note in subject.plan.notes)
    rows = [
        [safe(step.name) + ("" if step.ran else " (skipped)"), safe(step.numbers, 300), safe(step.change, 300)]
        for step in subject.steps
    ]
    headers = ["step", "figures", "what it changed"]
    steps = table("steps", headers, rows, words=3) if rows else ""
    if not rows:
        steps = '<p class="soft">The steps of the paper\'s exploration are shown by <code>--explain</code>.</p>'
    return section("exploration", "How it was found", f"<ul>{notes}</ul>" if notes else "", steps)


def _comparison(subject: Subject) -> str:
    found = subject.comparison
    if found is None:
        return ""
    stages = found.stages
    one_each = all(row.stage == row.rank for row in stages)
    rows = []
    for row in stages:
        in_flight = f"{row.in_flight.predicted:g} → {row.in_flight.measured:g}"
        bubble = f"{share(row.bubble.predicted)} → {share(row.bubble.measured)}"
        times = [_both(pair) for pair in (row.forward, row.backward, row.busy)]
        where = [str(row.stage)] if one_each else [str(row.stage), str(row.rank)]
        rows.append([*where, *times, bubble, in_flight, _memory_pair(row.memory)])
    worst = max(stages, key=lambda row: abs(row.busy.error or 0.0))
    counted = found.overhead.predicted
    planned = f"for which the plan counts {seconds(counted)}" if counted else "which the plan does not count"
    words = (
        f"<p>A step was predicted to take {seconds(found.step.predicted)} and took "
        f"{seconds(found.step.measured)}{prediction_error(found.step)} in the median. Its actions, from the first "
        f"to the end of the last, take {_both(found.time)}; what lies before and after them takes "
        f"{seconds(found.overhead.measured)}, {planned}. "
        f"The busy time of rank {worst.rank} is furthest off. Errors are predicted over measured, less one.</p>"
    )
    whole = [row.memory.measured for row in stages if row.memory.source == "resident"]
    peaks = [peak for peak in whole if peak is not None]
    if peaks:
        words += f"<p>The largest process held {size(float(max(peaks)))}, libraries included.</p>"
    where = ["stage"] if one_each else ["stage", "rank"]
    headers = [*where, "forward", "backward", "busy", "bubble", "in flight", "memory"]
    return section("comparison", "Predicted → measured", words, table("comparison", headers, rows))


def _memory_pair(pair: MemoryPair) -> str:
    """Measured only where it counts what the prediction counts."""
    if pair.measured is None or pair.source != "allocated":
        return f"{size(pair.predicted)} → –"
    error = "" if pair.error is None else f' <span class="error">({pair.error:+.0%})</span>'
    return f"{size(pair.predicted)} → {size(float(pair.measured))}{error}"


def _both(pair: Pair) -> str:
    return f"{seconds(pair.predicted)} → {seconds(pair.measured)}{prediction_error(pair)}"


def _about(plan: Plan) -> str:
    kinds: dict[str, int] = {}
    for accelerator in plan.cluster.accelerators:
        kinds[accelerator.type] = kinds.get(accelerator.type, 0) + 1
    cluster = ", ".join(f"{count} × {name}" for name, count in kinds.items())
    facts = [
        ("cluster", f"{plan.cluster.name}: {cluster}"),
        ("schedule", plan.schedule.name),
        (
            "global batch",
            f"{plan.global_batch} samples: {plan.microbatches} micro-batches of {plan.microbatch_size}",
        ),
        ("precision", plan.dtype),
        ("optimizer", plan.optimizer),
        ("strategy", plan.strategy),
        ("profile", f"{plan.profile_hash}, {plan.prediction.source}"),
    ]
    shown = "".join(f"<div><dt>{name}</dt><dd>{safe(value, 160)}</dd></div>" for name, value in facts)
    return section("about", "The plan", f'<dl class="facts">{shown}</dl>')
