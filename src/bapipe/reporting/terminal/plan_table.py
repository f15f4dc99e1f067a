"""A plan in the terminal: the answer in one sentence, the stages, the alternatives."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from bapipe.planner.partition.paper.step_record import Step
from bapipe.records.plan import Alternative, Plan, PlanReplica, PlanStage, Prediction
from bapipe.reporting.views.cut_links import cut_links
from bapipe.units import format_bytes, format_seconds, format_seconds_range, format_throughput

__all__ = ["answer", "kind_words", "render_alternatives", "render_plan", "render_steps", "shape", "stage_layers"]

_BAR = 4
_NAME = 24
"""characters of a layer's name, where two are shown"""
_SPELT_STAGES = 8
"""stages up to which the replicas of each are named though they are alike"""
_PLACE, _LAYERS = 11, 28
"""columns that names of accelerators and layers get, if they need them, before the table is set more closely"""
_LEAST_PLACE, _FEW_LAYERS, _LEAST_LAYERS = 7, 18, 12
"""columns that accelerators always get, those that layers get before accelerators take the rest, and always get"""


def shape(plan: Plan) -> str:
    """Schedule, stages and micro-batches in a few words."""
    return f"{kind_words(plan)}, {plan.microbatches} micro-batches of {plan.microbatch_size}"


def kind_words(plan: Plan) -> str:
    """Schedule and stages in a few words."""
    kind = {
        "data-parallel": f"data parallelism on {len(plan.ranks)} accelerators",
        "pipeline": f"{plan.schedule.name} over {len(plan.stages)} stages",
        "hybrid": f"{plan.schedule.name} over {_replicas([len(stage.accelerators) for stage in plan.stages])}",
    }[plan.kind]
    if plan.kind == "pipeline" and len(plan.stages) == 1:
        kind = "one accelerator"
    if plan.engine != "bapipe":
        engine = {"ddp": "DDP", "fsdp": "FSDP2"}[plan.engine]
        kind = f"{engine} of torch on {len(plan.ranks)} accelerators"
    if plan.zero_stage:
        kind = f"{kind}, ZeRO-{plan.zero_stage}"
    return kind


def _replicas(counts: Sequence[int]) -> str:
    """How many replicas the stages have, in a few words."""
    if len(counts) > _SPELT_STAGES and len(set(counts)) == 1:
        return f"{len(counts)} stages of {counts[0]} replicas each"
    return f"stages of {'-'.join(map(str, counts))} replicas"


def answer(plan: Plan) -> str:
    """What to run, how fast it is predicted to be, and how far that is from the bound."""
    prediction = plan.prediction
    return (
        f"{plan.model.name}: {shape(plan)}: "
        f"{_time(prediction)} per global batch of {plan.global_batch}, "
        f"{format_throughput(prediction.throughput)} samples/s, {prediction.gap:.1%} over the lower bound"
    )


def _time(about: Prediction | Alternative, *, between: str = " ") -> str:
    """The time, and the range in which it lies where that is known."""
    if about.time is None:
        return "–"
    time = format_seconds(about.time)
    if about.low is None or about.high is None:
        return time
    return f"{time}{between}{format_seconds_range(about.time, about.low, about.high)}"


def stage_layers(stage: PlanStage) -> str:
    """The stage's layers, first to last, with the channels of those it shares."""

    def end(index: int) -> str:
        for part in stage.fractions:
            if part.layer == index:
                return f"{index} [{part.start}:{part.stop}/{part.of}]"
        return str(index)

    first, last = end(stage.first_layer), end(stage.last_layer)
    most = _NAME if len(stage.layers) > 1 else 2 * _NAME
    names = " … ".join(_tail(name, most) for name in dict.fromkeys((stage.layers[0], stage.layers[-1])))
    place = first if stage.first_layer == stage.last_layer else f"{first}–{last}"
    return f"{place}  {names}"


def _tail(name: str, most: int) -> str:
    """The end of a long name, which says more than its beginning: blocks.7.attention of model.encoder.blocks…"""
    return name if len(name) <= most else f"…{name[1 - most :]}"


def _both(forward: float, backward: float) -> str:
    """Two times with one unit where they share it."""
    one, other = format_seconds(forward).split(), format_seconds(backward).split()
    return f"{one[0]} + {' '.join(other)}" if one[1] == other[1] else f"{' '.join(one)} + {' '.join(other)}"


def _bar(share: float) -> str:
    filled = min(_BAR, max(0, round(share * _BAR)))
    return "█" * filled + "░" * (_BAR - filled)


def render_plan(plan: Plan, *, alternatives: int = 8) -> RenderableType:
    """The answer, a row per stage, the alternatives and the notes."""
    parts: list[RenderableType] = [Text(answer(plan), style="bold"), _StageTable(plan)]
    if plan.alternatives:
        parts.append(render_alternatives(plan, alternatives))
    sizes = sorted({format_bytes(stage.memory_capacity) for stage in plan.stages})
    parts.append(Text(f"· memory: the peak of a stage; an accelerator has {' or '.join(sizes)}"))
    if len(plan.stages) > 1:
        parts.extend(Text(f"· {line}") for line in _links(plan))
    parts.extend(Text(f"· {note}") for note in plan.notes)
    return Group(*parts)


def _links(plan: Plan) -> list[str]:
    """The links between stages, where there are several kinds: one line for cuts that have the same."""
    cuts: dict[str, list[str]] = {}
    for number, link in enumerate(cut_links(plan)):
        cuts.setdefault(link.words, []).append(f"{number}–{number + 1}")
    return [f"link {words}: stages {', '.join(own)}" for words, own in cuts.items()]


class _StageTable:
    """A row per stage, set as closely as the terminal needs: figures are never cut, names wrap in what is left."""

    def __init__(self, plan: Plan) -> None:
        self._stages = plan.stages

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        stages = range(len(self._stages))
        # Wide, then with less space between columns, then without the bars.
        for gap, bars in ((3, True), (2, True), (2, False)):
            heads = ("#", "F + B", "in flight" if gap == 3 else "flight", "memory", "sends")
            rows = [row for number in stages for row in self._rows(number, bars=bars)]
            place, layer = (max(cell_len(row[column]) for row in rows) for column in (1, 2))
            figures = ((number, *rest) for number, _, _, *rest in rows)
            fixed = sum(max(map(cell_len, column)) for column in zip(heads, *figures, strict=True))
            room = options.max_width - fixed - 6 * gap - 2
            if room >= min(place, _PLACE) + min(layer, _LAYERS):
                break
        place = min(place, max(_LEAST_PLACE, room - min(layer, _FEW_LAYERS)))
        layer = min(layer, max(_LEAST_LAYERS, room - place))
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, gap - 2))
        table.add_column("#", justify="right", no_wrap=True)
        table.add_column("on", overflow="fold", width=place)
        table.add_column("layers", overflow="fold", width=layer)
        for head in ("F + B", "in flight" if gap == 3 else "in\nflight", "memory", "sends"):
            table.add_column(head, justify="left" if head == "memory" else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        yield table

    def _rows(self, number: int, *, bars: bool) -> list[tuple[str, ...]]:
        """The stage's own, and where its replicas are not alike one for those that are."""
        stage, groups = self._stages[number], _alike_replicas(self._stages[number])
        layers = stage_layers(stage) + (f" ({stage.recomputed})" if stage.recomputed else "")
        sends = format_bytes(stage.send_forward_bytes) if number + 1 < len(self._stages) else "–"
        load = ("", "", "") if groups else _load(stage, bars=bars)
        rows: list[tuple[str, ...]] = [(str(number), _place(stage.accelerators), layers, *load, sends)]
        for names, own in groups:
            taken = f"{own.microbatches} micro-batch{'es' if own.microbatches > 1 else ''}"
            each = " each" if len(names) > 1 else ""
            rows.append(("", _place(names), taken + each, *_load(own, bars=bars), ""))
        return rows


def _load(own: PlanStage | PlanReplica, *, bars: bool) -> tuple[str, str, str]:
    """Times, in-flight micro-batches and memory of a stage, or of one replica."""
    share = own.memory_bytes / own.memory_capacity if own.memory_capacity else 1.0
    memory = format_bytes(own.memory_bytes)
    return (
        _both(own.forward, own.backward),
        f"{own.in_flight:g}",
        f"{_bar(share)} {memory}" if bars else memory,
    )


def _alike_replicas(stage: PlanStage) -> list[tuple[list[str], PlanReplica]]:
    """Accelerators whose figures are the same, and those; none where all replicas are alike."""
    groups: list[tuple[list[str], PlanReplica]] = []
    for name, own in zip(stage.accelerators, stage.replicas or (), strict=stage.replicas is not None):
        known = next((names for names, other in groups if other == own), None)
        if known is None:
            groups.append(([name], own))
        else:
            known.append(name)
    return groups


def _place(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … ×{len(names)}"


def render_alternatives(plan: Plan, most: int = 8) -> Table:
    """The alternatives and why they lost."""
    table = Table(title="why not the others", title_justify="left")
    for header in ("alternative", "time", "memory", "reason"):
        table.add_column(header, justify="right" if header in ("time", "memory") else "left", overflow="fold")
    for alternative in plan.alternatives[:most]:
        time = _time(alternative, between="\n")
        table.add_row(alternative.name, time, format_bytes(alternative.memory_bytes), alternative.reason)
    if len(plan.alternatives) > most:
        table.caption = f"and {len(plan.alternatives) - most} more, which plan.json has (--out)"
    return table


def render_steps(steps: Sequence[Step]) -> Table:
    """The exploration's steps, for --explain."""
    table = Table(title="the exploration, step by step", title_justify="left")
    for header in ("step", "figures", "what it changed"):
        table.add_column(header, overflow="fold")
    for step in steps:
        table.add_row(step.name + ("" if step.ran else " (skipped)"), step.numbers, step.change)
    return table
