"""Cases of training to compare with one process, and their plans. Imports no torch."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from run_plans import CPU

from bapipe.hardware.cluster import Accelerator, Cluster, Link
from bapipe.models.layers import ModelRef
from bapipe.records.plan import LayerRun, Plan, PlanStage, Prediction
from bapipe.schedule.actions import Schedule
from bapipe.schedule.generators import data_parallel, make_schedule, with_recompute, with_update
from bapipe.schedule.schedule_file import ScheduleFile

__all__ = ["Case", "all_pairs", "falling_caps", "make_plan", "make_schedule_of", "read_cases", "write_cases"]

SIZE, SHORT = 3, 2
"""samples of a micro-batch, and of a short one; batch-norm needs two"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to train one model."""

    model: str
    numbers: str = "float64"
    """float64, float32, or dropout (in float64)"""
    schedule: str
    """one of `SCHEDULES`, 1f1b or zb with `caps`, or data-parallel, where the micro-batches are each replica's"""
    stages: int
    """pipeline stages, ranks if the schedule interleaves or is data-parallel"""
    microbatches: int
    caps: tuple[int, ...] | None = None
    replicas: tuple[int, ...] | None = None
    dealing: tuple[tuple[int, ...], ...] | None = None
    """for each stage, which of its replicas take which micro-batches"""
    virtual: tuple[int, ...] | None = None
    """where the schedule interleaves, the stages of each rank; None: two"""
    recompute: tuple[int, ...] = ()
    """stages"""
    layers: str = ""
    """of every stage, the layers that recompute: each of all, each odd one, or all in pairs; empty: none"""
    cut: str = "even"
    """even, early (one layer on each of the first stages), late, or scattered by chance"""
    short: bool = False
    """whether the last micro-batch is"""
    size: int = SIZE
    """samples of a micro-batch"""
    data: str = "everywhere"
    """who is given the global batch: all ranks, or those that need it"""
    training: str = "accumulate"
    """accumulate gradients of all steps, or update with adamw or sgd"""
    steps: int = 2
    evaluate: bool = False
    """after every step, on its global batch"""
    engine: str = "bapipe"
    """what runs the stages"""

    @property
    def name(self) -> str:
        """Unique among the cases of a test run, and readable."""
        parts = [self.model, self.numbers, self.schedule, f"N{self.stages}", f"M{self.microbatches}", self.cut]
        parts += [f"K{'.'.join(map(str, self.caps))}"] if self.caps else []
        parts += [f"r{'.'.join(map(str, self.replicas))}"] if self.replicas else []
        parts += [f"d{'.'.join(''.join(map(str, own)) for own in self.dealing)}"] if self.dealing else []
        parts += [f"v{'.'.join(map(str, self.virtual))}"] if self.virtual else []
        parts += [f"again{'.'.join(map(str, self.recompute))}"] if self.recompute else []
        parts += [f"layers.{self.layers}"] if self.layers else []
        parts += ["short"] if self.short else []
        parts += [self.data] if self.data != "everywhere" else []
        parts += [self.training] if self.training != "accumulate" else []
        parts += ["evaluate"] if self.evaluate else []
        parts += [self.engine] if self.engine != "bapipe" else []
        return "-".join(parts)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each micro-batch."""
        count = self.microbatches * (self.stages if self.schedule == "data-parallel" else 1)
        return (*[self.size] * (count - 1), SHORT if self.short else self.size)

    @property
    def captured(self) -> tuple[str, str]:
        """What of it a capture depends on."""
        return self.model, self.numbers

    @property
    def alone(self) -> tuple[object, ...]:
        """What of it training by one process depends on."""
        return self.model, self.numbers, self.sizes, self.training, self.steps


def write_cases(cases: Sequence[Case], path: Path) -> None:
    path.write_text(json.dumps([asdict(case) for case in cases]), encoding="ascii")


def read_cases(path: Path) -> list[Case]:
    rows = json.loads(path.read_text(encoding="ascii"))
    return [
        Case(**{key: _tuples(item) for key, item in row.items()})  # type: ignore[arg-type]
        for row in rows
    ]


def _tuples(item: object) -> object:
    return tuple(_tuples(part) for part in item) if isinstance(item, list) else item


def falling_caps(stages: int, microbatches: int, *, seed: object) -> tuple[int, ...]:
    """Any caps that no stage waits for ever with: a stage holds at least as many micro-batches as the next."""
    chance = random.Random(str(seed))
    return tuple(sorted((chance.randint(1, microbatches + 1) for _ in range(stages)), reverse=True))


def make_schedule_of(case: Case) -> Schedule:
    if case.schedule == "data-parallel":
        schedule = data_parallel(case.stages, case.microbatches)
    else:
        schedule = with_update(
            make_schedule(
                case.schedule,
                case.stages,
                case.microbatches,
                caps=case.caps,
                replicas=case.replicas,
                dealing=case.dealing,
                virtual=case.virtual or 2,
            )
        )
    return with_recompute(schedule, case.recompute) if case.recompute else schedule


def _firsts(case: Case, layers: int, stages: int) -> list[int]:
    """The first layer of each stage."""
    if case.cut == "even":
        return [layers * stage // stages for stage in range(stages)]
    if case.cut == "early":
        return list(range(stages))
    if case.cut == "late":
        return [0, *range(layers - stages + 1, layers)]
    chance = random.Random(f"{case.model} {case.schedule} {stages} {case.microbatches}")
    return [0, *sorted(chance.sample(range(1, layers), stages - 1))]


def _layer_runs(case: Case, first: int, after: int) -> tuple[LayerRun, ...]:
    """Of the stage of layers `first` to before `after`."""
    step = 2 if case.layers == "pairs" else 1
    chosen = {"": (), "all": range(first, after), "odd": range(first | 1, after, 2)}.get(
        case.layers, range(first, after, step)
    )
    return tuple(LayerRun(first=layer, last=min(layer + step, after) - 1) for layer in chosen)


def make_plan(case: Case, layers: Sequence[str], *, fingerprint: str | None = None) -> Plan:
    """The plan of a case for a model of these layers, on CPU ranks of one host; nothing is predicted."""
    schedule = make_schedule_of(case)
    firsts = _firsts(case, len(layers), schedule.num_stages)
    stages = []
    for index, (first, after) in enumerate(itertools.pairwise([*firsts, len(layers)])):
        assert first < after, f"{case.name}: {len(layers)} layers are too few"
        stages.append(
            PlanStage(
                accelerators=tuple(f"localhost/{rank}" for rank in schedule.placement[index]),
                first_layer=first,
                last_layer=after - 1,
                layers=tuple(layers[first:after]),
                recompute=index in case.recompute,
                recompute_layers=_layer_runs(case, first, after),
                forward=1.0,
                backward=2.0,
                weight_gradient=1.0,
                send_forward_bytes=0.0,
                send_backward_bytes=0.0,
                weight_bytes=0.0,
                memory_bytes=0.0,
                memory_capacity=CPU.memory,
                in_flight=1.0,
            )
        )
    cluster = Cluster(
        name="CPU ranks",
        accelerators=tuple(
            Accelerator(name=f"localhost/{rank}", type=CPU.name, node="localhost")
            for rank in range(schedule.num_ranks)
        ),
        types={CPU.name: CPU},
        within=Link(bandwidth=1e9, latency=50e-6),
    )
    nothing = Prediction(
        time=1.0, throughput=1.0, bubble=0.0, exposed_communication=0.0, lower_bound=1.0, gap=0.0, source="none"
    )
    return Plan(
        kind="data-parallel" if case.schedule == "data-parallel" else "hybrid" if case.replicas else "pipeline",
        model=ModelRef(name=case.model, ref="equality_models:build", fingerprint=fingerprint),
        profile_hash="none",
        cluster=cluster,
        dtype="fp32" if case.numbers == "float32" else "fp64",
        optimizer="sgd",
        strategy="by hand",
        microbatch_size=case.size,
        microbatches=len(case.sizes),
        global_batch=sum(case.sizes),
        stages=tuple(stages),
        schedule=ScheduleFile.of(schedule),
        prediction=nothing,
    )


Row = dict[str, object]
Pair = tuple[tuple[str, object], tuple[str, object]]


def all_pairs(factors: Mapping[str, Sequence[object]], *, never: set[Pair]) -> list[Row]:
    """Few rows in which every pair of two factors' values meets, but those of `never`; always the same rows.

    Greedy: a row starts with a pair that is still missing, and each other factor takes the value that makes most
    missing pairs.
    """
    names = list(factors)

    def pairs_of(row: Row) -> Iterator[Pair]:
        known = [name for name in names if name in row]
        for one, two in itertools.combinations(known, 2):
            yield ((one, row[one]), (two, row[two]))

    missing: dict[Pair, None] = {}
    for one, two in itertools.combinations(names, 2):
        for left, right in itertools.product(factors[one], factors[two]):
            if ((one, left), (two, right)) not in never:
                missing[(one, left), (two, right)] = None
    rows = []
    while missing:
        start = next(iter(missing))
        row: Row = dict(start)
        for name in names:
            if name in row:
                continue
            best, most = None, -1
            for turn in range(len(factors[name])):
                # Starting elsewhere in each row spreads the values that make no missing pair.
                value = factors[name][(turn + len(rows)) % len(factors[name])]
                made = [pair for pair in pairs_of({**row, name: value}) if (name, value) in pair]
                gain = sum(pair in missing for pair in made)
                if gain > most and not any(pair in never for pair in made):
                    best, most = value, gain
            assert most >= 0, f"no value of {name} goes with {row}"
            row[name] = best
        for pair in pairs_of(row):
            missing.pop(pair, None)
        rows.append({name: row[name] for name in names})
    return rows
