"""From what every rank saw to one RunRecord. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bapipe.io.files import content_hash
from bapipe.records.plan import Plan
from bapipe.records.run_record import (
    CheckRecord,
    EventRecord,
    MemorySource,
    RunEnvironment,
    RunRecord,
    StepRecord,
    TransferRecord,
)

__all__ = ["RankReport", "make_record", "median_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What one rank has to say after a run; times are of the recorded step and in rank 0's clock."""

    rank: int
    stage: int | None = None
    """its stage, where `peak_in_flight` is one number"""
    host: str
    events: tuple[tuple[str, float, float], ...]
    """action, start and end, none where nothing was traced; of an all-reduce its end counts, and the end of the
    stage's last backward"""
    sent: dict[str, tuple[int, float]]
    """action -> the rank its result went to, and when"""
    arrived: dict[str, float]
    """action of a neighbour -> when its result was in hand"""
    peak_in_flight: Mapping[int, int] | int
    """stage -> most micro-batches in flight at once, or that of `stage`, its only one"""
    peak_memory: int | None
    memory_source: MemorySource | None = None
    """what `peak_memory` counts; None: resident on a CPU, allocated on any other device"""
    device: str = "cpu"
    """what it computed on: `cpu`, `cuda`, or the name that the GPU gives itself"""

    def live_by_stage(self) -> Mapping[int, int]:
        """Stage -> most micro-batches in flight at once on this rank."""
        if not isinstance(self.peak_in_flight, int):
            return self.peak_in_flight
        assert self.stage is not None, "one number of micro-batches in flight needs the stage it is of"
        return {self.stage: self.peak_in_flight}


def median_step(steps: Sequence[StepRecord]) -> int:
    """The number of the step of median time; of two, the earlier in time's order."""
    ordered = sorted(steps, key=lambda step: (step.seconds, step.step))
    return ordered[(len(ordered) - 1) // 2].step


def make_record(
    plan: Plan,
    reports: Sequence[RankReport],
    *,
    steps: Sequence[tuple[float, float]],
    first_step: int = 0,
    recorded_step: int,
    torch_version: str,
    python_version: str,
    backend: str,
    threads: int,
    check: CheckRecord | None,
    transport: str | None = None,
    engine: str = "bapipe",
) -> RunRecord:
    """The record of a run. `steps` are loss and seconds of each, from `first_step` on; `transport` carried all
    that `engine` sent."""
    ranks = sorted(reports, key=lambda report: report.rank)
    zero = min((start for report in ranks for _, start, _ in report.events), default=0.0)

    def since(at: float) -> float:
        """Seconds since the first action; clocks say no more than nanoseconds."""
        return round(at - zero, 9)

    arrived = {action: at for report in ranks for action, at in report.arrived.items()}
    live: dict[int, int] = {}
    for report in ranks:
        for stage, count in report.live_by_stage().items():
            live[stage] = max(count, live.get(stage, 0))
    return RunRecord(
        model=plan.model,
        plan_hash=content_hash(plan),
        environment=RunEnvironment(
            torch=torch_version,
            python=python_version,
            hosts=tuple(report.host for report in ranks),
            backend=backend,
            threads=threads,
            devices=tuple(report.device for report in ranks),
            transport=transport,
            engine=engine,
        ),
        world_size=len(ranks),
        steps=tuple(
            StepRecord(step=step, loss=loss if math.isfinite(loss) else None, seconds=round(seconds, 9))
            for step, (loss, seconds) in enumerate(steps, first_step)
        ),
        recorded_step=recorded_step,
        events=tuple(
            EventRecord(rank=report.rank, action=action, start=since(start), end=since(end))
            for report in ranks
            for action, start, end in report.events
        ),
        transfers=tuple(
            TransferRecord(action=action, to_rank=peer, start=since(sent), arrival=since(arrived[action]))
            for report in ranks
            for action, (peer, sent) in report.sent.items()
        )
        if any(report.events for report in ranks)
        else None,
        peak_in_flight=tuple(live[stage] for stage in sorted(live)),
        peak_memory=tuple(report.peak_memory for report in ranks),
        memory_source=tuple(
            report.memory_source or ("resident" if report.device == "cpu" else "allocated") for report in ranks
        ),
        check=check,
    )
