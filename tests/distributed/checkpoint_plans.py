"""Plans to save and to load under: any schedule, cut anywhere, also within layers. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from equality_plans import Case, make_plan

from bapipe.hardware.cluster import Accelerator
from bapipe.records.plan import LayerPart, Plan
from bapipe.schedule.actions import Kind, Schedule
from bapipe.schedule.schedule_file import ScheduleFile

__all__ = ["Leg", "cut_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """Some steps of a training under one plan."""

    name: str
    schedule: Schedule
    cuts: tuple[tuple[str, int | None], ...] = ()
    """(layer, None): a stage ends after that layer; (layer, channels): after so many channels of it"""


def cut_plan(
    leg: Leg, names: Sequence[str], channels: Sequence[int | None], *, size: int, fingerprint: str
) -> Plan:
    """The plan of a leg for a model of these layers, which divide into so many channels."""
    case = Case(model="any", schedule="gpipe", stages=1, microbatches=leg.schedule.num_microbatches, size=size)
    base = make_plan(case, names, fingerprint=fingerprint)
    ends = [(names.index(layer), done) for layer, done in leg.cuts]
    again = {action.stage for lane in leg.schedule.lanes for action in lane if action.kind == Kind.R}
    stages, first, begun = [], 0, 0
    for ranks, (last, done) in zip(leg.schedule.placement, [*ends, (len(names) - 1, None)], strict=True):
        parts = []
        for layer in dict.fromkeys((first, last)):
            start, stop = begun if layer == first else 0, done if layer == last else None
            if start or stop is not None:
                of = channels[layer]
                assert of is not None, f"{names[layer]} does not divide"
                parts.append(LayerPart(layer=layer, start=start, stop=of if stop is None else stop, of=of))
        stages.append(
            replace(
                base.stages[0],
                accelerators=tuple(f"localhost/{rank}" for rank in ranks),
                first_layer=first,
                last_layer=last,
                layers=tuple(names[first : last + 1]),
                fractions=tuple(parts),
                recompute=len(stages) in again,
            )
        )
        first, begun = (last, done) if done is not None else (last + 1, 0)
    accelerators = tuple(
        Accelerator(name=f"localhost/{rank}", type="cpu-core", node="localhost")
        for rank in range(leg.schedule.num_ranks)
    )
    return replace(
        base,
        stages=tuple(stages),
        cluster=replace(base.cluster, accelerators=accelerators),
        schedule=ScheduleFile.of(leg.schedule),
    )
