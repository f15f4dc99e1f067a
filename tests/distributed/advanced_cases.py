"""Hybrid, zero-bubble, interleaved and split-layer training to compare with one process. Imports no torch."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from equality_plans import Case
from equality_plans import make_plan as plan_of_case

from bapipe.records.plan import LayerPart, Plan
from bapipe.schedule.actions import Schedule
from bapipe.schedule.generators import make_schedule, with_recompute, with_update

if TYPE_CHECKING:
    from bapipe.torch.capturing import Captured

__all__ = [
    "FULL",
    "QUICK",
    "AdvancedCase",
    "Cut",
    "make_advanced_plan",
    "read_advanced_cases",
    "schedule_of",
    "write_advanced_cases",
]

Cut = tuple[str, int]
"""after which layer a stage ends, and after how many of its channels; 0: after all"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvancedCase:
    """One way to train one model."""

    model: str
    """of `split_models`"""
    schedule: str
    microbatches: int
    cuts: tuple[Cut, ...]
    """ends of all stages but the last"""
    replicas: tuple[int, ...] | None = None
    recompute: tuple[int, ...] = ()
    short: bool = False
    """whether the last micro-batch is"""
    engine: str = "bapipe"
    """what runs the stages"""

    @property
    def stages(self) -> int:
        return len(self.cuts) + 1

    @property
    def name(self) -> str:
        cuts = ".".join(f"{layer}{f'@{done}' if done else ''}" for layer, done in self.cuts)
        parts = [self.model, self.schedule, f"M{self.microbatches}", cuts]
        parts += [f"r{'-'.join(map(str, self.replicas))}"] if self.replicas else []
        parts += [f"again{'.'.join(map(str, self.recompute))}"] if self.recompute else []
        parts += [self.engine] if self.engine != "bapipe" else []
        return "-".join([*parts, *(["short"] if self.short else [])])

    @property
    def sizes(self) -> tuple[int, ...]:
        return self._plain.sizes

    @property
    def _plain(self) -> Case:
        return Case(
            model=self.model,
            schedule=self.schedule,
            stages=self.stages // 2 if self.schedule == "interleaved" else self.stages,
            microbatches=self.microbatches,
            replicas=self.replicas,
            recompute=self.recompute,
            short=self.short,
        )


def schedule_of(case: AdvancedCase) -> Schedule:
    ranks = case.stages // 2 if case.schedule == "interleaved" else case.stages
    schedule = with_update(make_schedule(case.schedule, ranks, case.microbatches, replicas=case.replicas))
    return with_recompute(schedule, case.recompute) if case.recompute else schedule


def make_advanced_plan(case: AdvancedCase, captured: Captured) -> Plan:
    """The plan of a case, its stages where the cuts are."""
    names = [layer.name for layer in captured.layers]
    plan = plan_of_case(case._plain, [f"place{number}" for number in range(case.stages)])
    ends = [(names.index(layer), done) for layer, done in case.cuts] + [(len(names) - 1, 0)]
    stages, first, begun = [], 0, 0
    for stage, (last, done) in zip(plan.stages, ends, strict=True):
        parts = []
        for layer in dict.fromkeys((first, last)):
            start = begun if layer == first else 0
            of = captured.layers[layer].split.channels if captured.layers[layer].split else 0
            stop = done if layer == last and done else of
            if start or stop < of:
                parts.append(LayerPart(layer=layer, start=start, stop=stop, of=of))
        stages.append(
            replace(
                stage,
                first_layer=first,
                last_layer=last,
                layers=tuple(names[first : last + 1]),
                fractions=tuple(parts),
            )
        )
        first, begun = (last, done) if done else (last + 1, 0)
    return replace(plan, stages=tuple(stages))


def write_advanced_cases(cases: Sequence[AdvancedCase], path: Path) -> None:
    path.write_text(json.dumps([asdict(case) for case in cases]), encoding="ascii")


def read_advanced_cases(path: Path) -> list[AdvancedCase]:
    found = []
    for row in json.loads(path.read_text(encoding="ascii")):
        row["cuts"] = tuple((layer, done) for layer, done in row["cuts"])
        row["recompute"] = tuple(row["recompute"])
        row["replicas"] = None if row["replicas"] is None else tuple(row["replicas"])
        found.append(AdvancedCase(**row))
    return found


HYBRID = (
    AdvancedCase(model="pictures", schedule="1f1b-so", microbatches=5, cuts=(("first", 0),), replicas=(2, 1)),
    AdvancedCase(
        model="words-ignored", schedule="1f1b-sno", microbatches=4, cuts=(("between", 0),), replicas=(3, 1)
    ),
    AdvancedCase(
        model="pictures-dropout",
        schedule="gpipe",
        microbatches=5,
        cuts=(("second", 0),),
        replicas=(2, 2),
        short=True,
    ),
)
ZERO_BUBBLE = tuple(
    AdvancedCase(model=model, schedule=schedule, microbatches=M, cuts=cuts, short=short, recompute=again)
    for model, schedule, M, cuts, short, again in (
        ("pictures-dropout", "zb-h1", 6, (("first", 0), ("second", 0), ("hidden", 0)), True, ()),
        ("pictures", "zb-h2", 8, (("first", 0), ("second", 0), ("hidden", 0)), False, ()),
        ("words-sum", "zb-h1", 4, (("embedding", 0), ("between", 0)), False, (1,)),
        ("words", "zb-h2", 6, (("both_ways", 0), ("one_way", 0)), True, ()),
    )
)
INTERLEAVED = (
    AdvancedCase(
        model="words-sum",
        schedule="interleaved",
        microbatches=4,
        cuts=(("embedding", 0), ("both_ways", 0), ("one_way", 0)),
    ),
    AdvancedCase(
        model="pictures",
        schedule="interleaved",
        microbatches=5,
        cuts=(("first", 0), ("second", 0), ("hidden", 0)),
        short=True,
    ),
)
SPLIT = (
    AdvancedCase(model="pictures-dropout", schedule="1f1b-so", microbatches=4, cuts=(("hidden", 3),), short=True),
    AdvancedCase(model="pictures-dropout", schedule="1f1b-sno", microbatches=4, cuts=(("first", 2),)),
    AdvancedCase(
        model="pictures", schedule="gpipe", microbatches=3, cuts=(("second", 4), ("second", 7)), short=True
    ),
    AdvancedCase(model="words", schedule="1f1b-so", microbatches=4, cuts=(("embedding", 3), ("classifier", 11))),
    AdvancedCase(
        model="words-ignored", schedule="1f1b-sno", microbatches=4, cuts=(("classifier", 7), ("classifier", 20))
    ),
    AdvancedCase(
        model="words-sum", schedule="1f1b-so", microbatches=4, cuts=(("both_ways", 1), ("classifier", 29))
    ),
    AdvancedCase(model="words-ignored", schedule="1f1b-so", microbatches=3, cuts=(("one_way", 2), ("one_way", 4))),
    AdvancedCase(model="words-sum", schedule="gpipe", microbatches=2, cuts=(("one_way", 4),), recompute=(0, 1)),
)
SPLIT_AND = (
    AdvancedCase(model="pictures-dropout", schedule="zb-h1", microbatches=5, cuts=(("first", 4), ("hidden", 5))),
    AdvancedCase(
        model="words-ignored",
        schedule="zb-h2",
        microbatches=5,
        cuts=(("both_ways", 1), ("one_way", 3), ("classifier", 12)),
        short=True,
    ),
    AdvancedCase(
        model="pictures", schedule="1f1b-so", microbatches=5, cuts=(("first", 3),), replicas=(2, 1), short=True
    ),
    AdvancedCase(
        model="words-sum", schedule="1f1b-sno", microbatches=4, cuts=(("classifier", 13),), replicas=(2, 2)
    ),
    AdvancedCase(model="words", schedule="1f1b-sno", microbatches=4, cuts=(("one_way", 2),), replicas=(1, 3)),
    AdvancedCase(
        model="words-ignored",
        schedule="interleaved",
        microbatches=4,
        cuts=(("embedding", 5), ("one_way", 3), ("classifier", 9)),
    ),
)
SIDE_BY_SIDE = (
    AdvancedCase(model="pictures", schedule="zb-h1", microbatches=5, cuts=(("second", 0),), replicas=(2, 2)),
    AdvancedCase(
        model="words-sum", schedule="zb-h2", microbatches=6, cuts=(("one_way", 2),), replicas=(2, 2), short=True
    ),
)
TORCH = (
    AdvancedCase(
        model="pictures", schedule="1f1b-so", microbatches=4, cuts=(("first", 2), ("second", 5)), engine="torch"
    ),
    AdvancedCase(
        model="words", schedule="zb-h1", microbatches=4, cuts=(("between", 4), ("one_way", 1)), engine="torch"
    ),
)
"""split layers by torch's engine"""
QUICK = (*TORCH, *HYBRID, *ZERO_BUBBLE, *INTERLEAVED, *SPLIT, *SPLIT_AND, *SIDE_BY_SIDE)

_CUTS: dict[str, tuple[tuple[Cut, ...], ...]] = {
    "pictures": (
        (("first", 2), ("hidden", 0)),
        (("first", 0), ("second", 5)),
        (("second", 3), ("second", 8)),
        (("second", 0), ("hidden", 1)),
        (("hidden", 4), ("head", 2)),
    ),
    "words": (
        (("embedding", 2), ("between", 0)),
        (("both_ways", 1), ("classifier", 15)),
        (("between", 4), ("one_way", 1)),
        (("one_way", 2), ("one_way", 5)),
        (("classifier", 1), ("classifier", 28)),
    ),
}
_MODELS = ("pictures", "pictures-dropout", "words", "words-ignored", "words-sum")


def _full() -> tuple[AdvancedCase, ...]:
    """Every model and cut under every schedule, with replicas where those have them."""
    found = []
    for model, schedule, short in itertools.product(
        _MODELS, ("gpipe", "1f1b-sno", "1f1b-so", "zb-h1", "zb-h2"), (False, True)
    ):
        for cuts in _CUTS[model.partition("-")[0]]:
            ways: list[tuple[int, ...] | None] = [None]
            ways += [(2, 2, 2)] if schedule.startswith("zb") else [(2, 1, 1), (1, 2, 1), (1, 1, 2)]
            for replicas in ways:
                found.append(
                    AdvancedCase(
                        model=model,
                        schedule=schedule,
                        microbatches=5,
                        cuts=cuts,
                        replicas=replicas,
                        short=short,
                        recompute=(1,) if short and replicas is None else (),
                    )
                )
    for model in _MODELS:
        first, second, *_, last = _CUTS[model.partition("-")[0]]
        cuts = (first[0], *(second if model.startswith("words") else last))
        found.append(AdvancedCase(model=model, schedule="interleaved", microbatches=6, cuts=cuts, short=True))
    return tuple(found)


FULL = _full()
