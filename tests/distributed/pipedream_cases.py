"""Ways to train by PipeDream, and their plans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from equality_plans import Case
from equality_plans import make_plan as plan_of_case

from bapipe.records.plan import LayerPart, Plan
from bapipe.schedule.generators import pipedream
from bapipe.schedule.schedule_file import ScheduleFile

if TYPE_CHECKING:
    from bapipe.torch.capturing import Captured

__all__ = ["PipeDreamCase", "lag_of", "make_plan", "read_cases", "write_cases"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeDreamCase:
    """One way to train one model; in two runs, between which the pipeline drains."""

    model: str
    stages: int
    microbatches: int
    optimizer: str
    """momentum or adam"""
    numbers: str = "float64"
    steps: int = 5
    short: bool = False
    vertical_sync: bool = False
    split: str | None = None
    """a layer of which the first stage has half"""

    @property
    def name(self) -> str:
        parts = [self.model, self.numbers, f"N{self.stages}", f"M{self.microbatches}", self.optimizer]
        parts += [word for word in ("short", "vertical_sync") if getattr(self, word)]
        return "-".join([*parts, *([f"half-of-{self.split}"] if self.split else [])])

    @property
    def sizes(self) -> tuple[int, ...]:
        return self._plain.sizes

    @property
    def _plain(self) -> Case:
        return Case(
            model=self.model,
            numbers=self.numbers,
            schedule="1f1b-sno",
            stages=self.stages,
            microbatches=self.microbatches,
            short=self.short,
        )


def lag_of(case: PipeDreamCase, stage: int) -> int:
    """Updates that a micro-batch does not see: those of the N − i − 1 others in flight at stage i (from 0)."""
    return case.stages - (1 if case.vertical_sync else stage + 1)


def make_plan(case: PipeDreamCase, captured: Captured) -> Plan:
    names = [layer.name for layer in captured.layers]
    plan = plan_of_case(case._plain, names, fingerprint=captured.fingerprint)
    plan = replace(plan, schedule=ScheduleFile.of(pipedream(case.stages, case.microbatches)))
    if case.split is None:
        return plan
    layer = names.index(case.split)
    split = captured.layers[layer].split
    assert split is not None
    first, second, *others = plan.stages
    middle, last = split.channels // 2, second.last_layer
    stages = (
        replace(
            first,
            last_layer=layer,
            layers=tuple(names[: layer + 1]),
            fractions=(LayerPart(layer=layer, start=0, stop=middle, of=split.channels),),
        ),
        replace(
            second,
            first_layer=layer,
            layers=tuple(names[layer : last + 1]),
            fractions=(LayerPart(layer=layer, start=middle, stop=split.channels, of=split.channels),),
        ),
        *others,
    )
    return replace(plan, stages=stages)


def write_cases(cases: Sequence[PipeDreamCase], path: Path) -> None:
    path.write_text(json.dumps([asdict(case) for case in cases]), encoding="ascii")


def read_cases(path: Path) -> list[PipeDreamCase]:
    return [PipeDreamCase(**row) for row in json.loads(path.read_text(encoding="ascii"))]
