"""What was predicted of a plan beside what a run of it measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from bapipe.analysis.link_estimate import LinkEstimate, estimate_links
from bapipe.errors import BaPipeError
from bapipe.io.files import content_hash, plain_values
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.records.plan import Plan
from bapipe.records.run_record import MemorySource, RunRecord, to_timeline
from bapipe.schedule.actions import Action, Kind, Schedule
from bapipe.simulator.timeline import Timeline, Transfers

__all__ = [
    "Comparison",
    "MemoryPair",
    "Pair",
    "StageComparison",
    "compare",
    "comparison_values",
    "full_microbatches",
    "mean_work",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One figure, predicted and measured."""

    predicted: float
    measured: float

    @property
    def error(self) -> float | None:
        """predicted / measured − 1: above 0 where the prediction was too high; None where nothing was measured."""
        return self.predicted / self.measured - 1 if self.measured > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPair:
    """Peak bytes of an accelerator, and what was measured of them."""

    predicted: float
    """weights, gradients, optimizer state, saved activations and workspace of all stages there"""
    measured: int | None
    """None: not known"""
    source: MemorySource
    """allocated counts what the prediction counts; resident is a whole process, libraries and all"""

    @property
    def error(self) -> float | None:
        """predicted / measured − 1; None where nothing comparable was measured."""
        return self.predicted / self.measured - 1 if self.measured and self.source == "allocated" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageComparison:
    """One stage on one of its ranks: seconds per micro-batch, and the rank's part of the global batch.

    Times per micro-batch are means over those of the plan's size. What the plan or the run lacks is None.
    """

    stage: int
    rank: int
    forward: Pair
    """F"""
    backward: Pair
    """B, or I and W together where the schedule has them apart"""
    recompute: Pair | None = None
    """R: the forward again, before the backward"""
    input_gradient: Pair | None = None
    """I"""
    weight_gradient: Pair | None = None
    """W"""
    all_reduce: Pair | None = None
    """A: seconds from the last backward of the last replica to the end; what overlaps a backward is hidden"""
    update: Pair | None = None
    """U of the rank: all its stages together, since an optimizer takes them at once"""
    busy: Pair
    """seconds of the global batch in which the rank computes, optimizer step included"""
    exposed: Pair | None = None
    """seconds in which the rank waits for an input that is on its way; None: the run recorded no transfers"""
    bubble: Pair
    """share of the global batch in which the rank does not compute"""
    in_flight: Pair
    """most in-flight micro-batches of the stage on the rank"""
    memory: MemoryPair
    """of the rank: all its stages together"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A plan's prediction beside the recorded step of a run."""

    schedule: str
    stages: tuple[StageComparison, ...]
    """by stage, then rank; a stage has an entry for each of its replicas"""
    links: tuple[LinkEstimate, ...]
    """what the transfers say of the links, where any was waited for"""
    bubble: Pair
    """of all ranks together"""
    step: Pair
    """seconds of a step: the plan's prediction, and the median over the steps after the first"""
    time: Pair
    """of it, seconds from the first action of the global batch to the end of its last"""
    overhead: Pair
    """of it, seconds beside its actions: those that the plan counts, and those before the first and after the last
    action of the recorded step"""
    predicted: Timeline
    measured: Timeline

    @property
    def step_seconds(self) -> float:
        """The measured step."""
        return self.step.measured

    @property
    def outside_seconds(self) -> float:
        """The measured overhead."""
        return self.overhead.measured


def compare(plan: Plan, record: RunRecord) -> Comparison:
    """Set the plan's simulated timeline against the one that the run recorded.

    All-reduces and optimizer steps that only one of the two has are left out of both, so that the same work
    is compared. Raises BaPipeError where the run is not of this plan.
    """
    found, expected = record.plan_hash, content_hash(plan)
    if found != expected:
        raise BaPipeError(f"the run is of plan {found}, this plan is {expected}; give the plan that was run")
    schedule = plan.schedule.to_schedule()
    predicted, measured = plan_timeline(plan), to_timeline(record)
    _require_same_actions(schedule, predicted, measured)
    step = record.traced
    if not schedule.flushes:
        # A step of an endless pipeline lasts from the end of the one before to its own: M steady periods.
        measured = replace(measured, period=step.seconds / plan.microbatches)
    overhead = Pair(predicted=plan.prediction.time - predicted.time, measured=step.seconds - measured.time)
    for kind in (Kind.A, Kind.U):
        if not (_has(predicted, kind) and _has(measured, kind)):
            predicted, measured = _without(predicted, kind), _without(measured, kind)
    figures = _Figures(plan, record, predicted, measured)
    seconds = [step.seconds for step in record.steps[1:] or record.steps]
    return Comparison(
        schedule=plan.schedule.name,
        stages=tuple(figures.of(stage, rank) for stage, ranks in enumerate(schedule.placement) for rank in ranks),
        links=estimate_links(plan, measured),
        bubble=Pair(predicted=predicted.bubble, measured=measured.bubble),
        step=Pair(predicted=predicted.time + overhead.predicted, measured=float(np.median(seconds))),
        time=Pair(predicted=predicted.time, measured=measured.time),
        overhead=overhead,
        predicted=predicted,
        measured=measured,
    )


def _require_same_actions(schedule: Schedule, predicted: Timeline, measured: Timeline) -> None:
    """Every rank has run what the plan gives it; all-reduces and optimizer steps may be missing."""
    optional = {
        (rank, stage, int(kind), -1)
        for stage, ranks in enumerate(schedule.placement)
        for rank in ranks
        for kind in (Kind.A, Kind.U)
    }
    planned, run = (Counter(_actions(timeline)) for timeline in (predicted, measured))
    for amount, what in ((planned - run, "fewer"), (run - planned, "more")):
        for key in amount:
            if key not in optional or amount[key] > 1:
                rank, stage, kind, microbatch = key
                action = Action(stage, Kind(kind), None if microbatch < 0 else microbatch)
                raise BaPipeError(
                    f"the run has {what} {action} on rank {rank} than the plan, which has {planned[key]}, not "
                    f"{run[key]}; run the plan again"
                )


def _actions(timeline: Timeline) -> list[tuple[int, int, int, int]]:
    columns = (timeline.ranks, timeline.stages, timeline.kinds, timeline.microbatches)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _has(timeline: Timeline, kind: Kind) -> bool:
    return bool((timeline.kinds == kind).any())


def _without(timeline: Timeline, kind: Kind) -> Timeline:
    """The timeline without its all-reduces or optimizer steps, which send nothing."""
    kept = timeline.kinds != kind
    columns = ("kinds", "stages", "microbatches", "ranks", "lanes", "start", "end", "work")
    position = np.cumsum(kept) - 1
    transfers = timeline.transfers
    return Timeline(
        num_ranks=timeline.num_ranks,
        num_stages=timeline.num_stages,
        num_microbatches=timeline.num_microbatches,
        transfers=Transfers(
            source=position[transfers.source],
            to_rank=transfers.to_rank,
            start=transfers.start,
            arrival=transfers.arrival,
        ),
        period=timeline.period,
        **{column: getattr(timeline, column)[kept] for column in columns},
    )


def full_microbatches(plan: Plan) -> int:
    """How many micro-batches have the plan's size: all, or all but a shorter last one."""
    return min(plan.microbatches, plan.global_batch // plan.microbatch_size)


def mean_work(
    timeline: Timeline, stage: int, ranks: Collection[int], kinds: Sequence[Kind], *, below: int
) -> float | None:
    """Mean seconds of a stage's actions of these kinds on these ranks, micro-batches from 0 up to `below`.

    None where there is no such action. All-reduces and optimizer steps, which have no micro-batch, always count.
    """
    own = (
        (timeline.stages == stage)
        & np.isin(timeline.ranks, list(ranks))
        & np.isin(timeline.kinds, list(kinds))
        & (timeline.microbatches < below)
    )
    return float(timeline.work[own].mean()) if own.any() else None


class _Figures:
    """The figures of both timelines, those of whole ranks worked out once."""

    def __init__(self, plan: Plan, record: RunRecord, predicted: Timeline, measured: Timeline) -> None:
        self._plan, self._record = plan, record
        self._both = (predicted, measured)
        self._full = full_microbatches(plan)
        self._busy = [timeline.busy() for timeline in self._both]
        self._exposed = [timeline.exposed_communication() for timeline in self._both]

    def of(self, stage: int, rank: int) -> StageComparison:
        split = _has(self._both[0], Kind.W)
        whole = [self._mean(stage, rank, (kind,)) for kind in ((Kind.I, Kind.W) if split else (Kind.B,))]
        parts = [pair or Pair(predicted=0.0, measured=0.0) for pair in whole]
        return StageComparison(
            stage=stage,
            rank=rank,
            forward=self._mean(stage, rank, (Kind.F,)) or Pair(predicted=0.0, measured=0.0),
            backward=Pair(
                predicted=sum(pair.predicted for pair in parts), measured=sum(pair.measured for pair in parts)
            ),
            recompute=self._mean(stage, rank, (Kind.R,)),
            # A first stage has none to speak of: it sends no input gradient.
            input_gradient=whole[0] if split and parts[0].predicted > 0 else None,
            weight_gradient=whole[1] if split else None,
            all_reduce=self._pair([_all_reduce(timeline, stage, rank) for timeline in self._both]),
            update=self._pair([_updates(timeline, rank) for timeline in self._both]),
            busy=Pair(predicted=self._busy[0][rank], measured=self._busy[1][rank]),
            exposed=None
            if self._record.transfers is None
            else Pair(predicted=self._exposed[0][rank], measured=self._exposed[1][rank]),
            bubble=Pair(predicted=self._idle(0, rank), measured=self._idle(1, rank)),
            in_flight=Pair(
                predicted=_peak_in_flight(self._both[0], stage, rank),
                measured=_peak_in_flight(self._both[1], stage, rank),
            ),
            memory=MemoryPair(
                predicted=self._plan.stages[stage].memory_bytes,
                measured=self._record.peak_memory[rank],
                source=self._record.memory_source[rank] if self._record.memory_source else "resident",
            ),
        )

    def _mean(self, stage: int, rank: int, kinds: Sequence[Kind]) -> Pair | None:
        """Over the full micro-batches, or over all that the rank has if it has no full one."""
        for below in (self._full, self._plan.microbatches):
            pair = self._pair([mean_work(one, stage, (rank,), kinds, below=below) for one in self._both])
            if pair is not None:
                return pair
        return None

    def _pair(self, values: Sequence[float | None]) -> Pair | None:
        predicted, measured = values
        return None if predicted is None or measured is None else Pair(predicted=predicted, measured=measured)

    def _idle(self, which: int, rank: int) -> float:
        time = self._both[which].time
        return 1 - self._busy[which][rank] / time if time > 0 else 0.0


def _all_reduce(timeline: Timeline, stage: int, rank: int) -> float | None:
    """From the end of the stage's last gradient on any replica to the end of the all-reduce on this rank."""
    own = timeline.stages == stage
    reduced = own & (timeline.kinds == Kind.A) & (timeline.ranks == rank)
    if not reduced.any():
        return None
    gradients = timeline.end[own & np.isin(timeline.kinds, (Kind.B, Kind.W))]
    return max(0.0, float(timeline.end[reduced].max() - gradients.max()))


def _updates(timeline: Timeline, rank: int) -> float | None:
    own = (timeline.kinds == Kind.U) & (timeline.ranks == rank)
    return float(timeline.work[own].sum()) if own.any() else None


def _peak_in_flight(timeline: Timeline, stage: int, rank: int) -> float:
    """Most micro-batches of one stage on one rank between the start of F and the end of B or W."""
    own = (timeline.stages == stage) & (timeline.ranks == rank)
    release = Kind.W if _has(timeline, Kind.W) else Kind.B
    starts = timeline.start[own & (timeline.kinds == Kind.F)]
    ends = timeline.end[own & (timeline.kinds == release)]
    times = np.concatenate([starts, ends])
    steps = np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])
    order = np.lexsort((steps, times))
    return float(np.cumsum(steps[order]).max(initial=0.0))


def comparison_values(comparison: Comparison) -> dict[str, Any]:
    """The figures as plain values, each pair with its error; the timelines are left out."""
    figures = {
        field.name: _with_errors(getattr(comparison, field.name))
        for field in fields(Comparison)
        if field.name not in ("predicted", "measured")
    }
    return figures | {"step_seconds": comparison.step_seconds, "outside_seconds": comparison.outside_seconds}


def _with_errors(value: Any) -> Any:
    if isinstance(value, (Pair, MemoryPair)):
        return {**plain_values(value), "error": value.error}
    if isinstance(value, tuple):
        return [_with_errors(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _with_errors(getattr(value, field.name)) for field in fields(value)}
    return value
