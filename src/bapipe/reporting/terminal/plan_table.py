"""A plan in the terminal: the answer in one sentence, the stages, the rivals."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from bapipe.planner.partition.paper.step_record import Step
from bapipe.records.plan import Plan, PlanStage
from bapipe.units import format_bytes, format_seconds, format_throughput

__all__ = ["answer", "render_plan", "render_rivals", "render_steps", "stage_layers"]

_BAR = 4


def answer(plan: Plan) -> str:
    """What to run, how fast, and how far from the bound."""
    shape = {
        "data-parallel": f"data parallelism on {len(plan.ranks)} accelerators",
        "pipeline": f"{plan.schedule.name} over {len(plan.stages)} stages",
        "hybrid": f"{plan.schedule.name} over stages of "
        + "-".join(str(len(stage.accelerators)) for stage in plan.stages)
        + " replicas",
    }[plan.kind]
    if plan.kind == "pipeline" and len(plan.stages) == 1:
        shape = "one accelerator"
    prediction = plan.prediction
    return (
        f"{plan.model.name}: {shape}, {plan.microbatches} micro-batches of {plan.microbatch_size}: "
        f"{format_seconds(prediction.time)} per mini-batch of {plan.minibatch}, "
        f"{format_throughput(prediction.throughput)} samples/s, {prediction.gap:.1%} over the lower bound"
    )


def stage_layers(stage: PlanStage) -> str:
    """The stage's layers, first to last, with the channels of those it shares."""

    def end(index: int) -> str:
        for part in stage.fractions:
            if part.layer == index:
                return f"{index} [{part.start}:{part.stop}/{part.of}]"
        return str(index)

    first, last = end(stage.first_layer), end(stage.last_layer)
    names = stage.layers[0] if len(stage.layers) == 1 else f"{stage.layers[0]} … {stage.layers[-1]}"
    place = first if stage.first_layer == stage.last_layer else f"{first}–{last}"
    return f"{place}  {names[:48]}"


def _both(forward: float, backward: float) -> str:
    """Two times with one unit where they share it."""
    one, other = format_seconds(forward).split(), format_seconds(backward).split()
    return f"{one[0]} + {' '.join(other)}" if one[1] == other[1] else f"{' '.join(one)} + {' '.join(other)}"


def _bar(share: float) -> str:
    filled = min(_BAR, max(0, round(share * _BAR)))
    return "█" * filled + "░" * (_BAR - filled)


def render_plan(plan: Plan, *, rivals: int = 8) -> RenderableType:
    """The answer, a row per stage, the rivals and the notes."""
    stages = Table(box=SIMPLE_HEAD, pad_edge=False)
    for header, justify in (
        ("#", "right"),
        ("on", "left"),
        ("layers", "left"),
        ("F + B", "right"),
        ("live", "right"),
        ("memory", "left"),
        ("sends", "right"),
    ):
        wraps = header in ("on", "layers")
        least = {"on": 7, "layers": 12}.get(header)
        stages.add_column(
            header,
            justify="right" if justify == "right" else "left",
            no_wrap=not wraps,
            overflow="fold",
            min_width=least,
        )
    for index, stage in enumerate(plan.stages):
        share = stage.memory_bytes / stage.memory_capacity if stage.memory_capacity else 1.0
        where = stage.accelerators[0]
        if len(stage.accelerators) > 1:
            where = f"{stage.accelerators[0]} … ×{len(stage.accelerators)}"
        stages.add_row(
            str(index),
            escape(where),
            escape(stage_layers(stage)) + (" (recomputes)" if stage.recompute else ""),
            _both(stage.forward, stage.backward),
            f"{stage.peak_features:g}",
            f"{_bar(share)} {format_bytes(stage.memory_bytes)}",
            format_bytes(stage.send_forward_bytes) if index + 1 < len(plan.stages) else "–",
        )
    parts: list[RenderableType] = [Text(answer(plan), style="bold"), stages]
    if plan.rivals:
        parts.append(render_rivals(plan, rivals))
    sizes = sorted({format_bytes(stage.memory_capacity) for stage in plan.stages})
    parts.append(Text(f"· memory: the bar is the share of the accelerator's {' or '.join(sizes)}"))
    parts.extend(Text(f"· {note}") for note in plan.notes)
    return Group(*parts)


def render_rivals(plan: Plan, most: int = 8) -> Table:
    """The rivals and why they lost."""
    table = Table(title="why not the others", title_justify="left")
    for header in ("rival", "time", "memory", "reason"):
        table.add_column(header, justify="right" if header in ("time", "memory") else "left", overflow="fold")
    for rival in plan.rivals[:most]:
        time = "–" if rival.time is None else format_seconds(rival.time)
        table.add_row(escape(rival.name), time, format_bytes(rival.memory_bytes), escape(rival.reason))
    if len(plan.rivals) > most:
        table.caption = f"and {len(plan.rivals) - most} more, which plan.json has (--out)"
    return table


def render_steps(steps: Sequence[Step]) -> Table:
    """The exploration's steps, for --explain."""
    table = Table(title="the exploration, step by step", title_justify="left")
    for header in ("step", "on what numbers", "what it changed"):
        table.add_column(header, overflow="fold")
    for step in steps:
        table.add_row(step.name + ("" if step.ran else " (skipped)"), escape(step.numbers), escape(step.change))
    return table
