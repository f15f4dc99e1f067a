"""What was predicted of a plan beside what a run of it measured."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from rich.table import Table

from bapipe.errors import BaPipeError
from bapipe.evaluate import plan_timeline
from bapipe.files import content_hash
from bapipe.plan import Plan
from bapipe.run_record import RunRecord, to_timeline
from bapipe.schedule.actions import Kind
from bapipe.timeline import Timeline, Transfers
from bapipe.units import format_seconds

__all__ = ["Comparison", "Pair", "StageComparison", "compare", "comparison_table"]


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
class StageComparison:
    """One stage: seconds per micro-batch, and its rank's part of the mini-batch."""

    stage: int
    rank: int
    forward: Pair
    """seconds of one micro-batch, mean over the mini-batch"""
    backward: Pair
    busy: Pair
    """seconds of the mini-batch in which the rank computes, update included"""
    bubble: Pair
    """share of the mini-batch in which it does not"""
    live: Pair
    """most micro-batches live at once"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A plan's prediction beside the recorded step of a run."""

    schedule: str
    stages: tuple[StageComparison, ...]
    bubble: Pair
    """of all ranks together"""
    time: Pair
    """seconds from the first action of the mini-batch to the end of its last"""
    step_seconds: float
    """median over the steps after the first: it has the synchronisation of the ranks on top of `time`"""
    predicted: Timeline
    measured: Timeline


def compare(plan: Plan, record: RunRecord) -> Comparison:
    """Set the plan's simulated timeline against the one that the run recorded."""
    found, expected = record.plan_hash, content_hash(plan)
    if found != expected:
        raise BaPipeError(f"the run is of plan {found}, this plan is {expected}; give the plan that was run")
    predicted, measured = plan_timeline(plan), to_timeline(record)
    if not _has_updates(predicted):
        measured = _without_updates(measured)
    seconds = [step.seconds for step in record.steps[1:] or record.steps]
    return Comparison(
        schedule=plan.schedule.name,
        stages=tuple(_stage(stage, predicted, measured) for stage in range(len(plan.stages))),
        bubble=Pair(predicted=predicted.bubble, measured=measured.bubble),
        time=Pair(predicted=predicted.time, measured=measured.time),
        step_seconds=float(np.median(seconds)),
        predicted=predicted,
        measured=measured,
    )


def _has_updates(timeline: Timeline) -> bool:
    return bool((timeline.kinds == Kind.U).any())


def _without_updates(timeline: Timeline) -> Timeline:
    """The timeline up to the last backward, to be set against a prediction that ends there."""
    kept = timeline.kinds != Kind.U
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
        **{column: getattr(timeline, column)[kept] for column in columns},
    )


def _stage(stage: int, predicted: Timeline, measured: Timeline) -> StageComparison:
    ranks = measured.ranks[measured.stages == stage]
    if not len(ranks):
        raise BaPipeError(f"the run has no events of stage {stage}; run the plan again")
    rank = int(ranks[0])

    def pair(figure: list[float]) -> Pair:
        return Pair(predicted=figure[0], measured=figure[1])

    both = (predicted, measured)
    return StageComparison(
        stage=stage,
        rank=rank,
        forward=pair([_mean(timeline, stage, Kind.F) for timeline in both]),
        backward=pair([_mean(timeline, stage, Kind.B) for timeline in both]),
        busy=pair([timeline.busy()[rank] for timeline in both]),
        bubble=pair([_idle_share(timeline, rank) for timeline in both]),
        live=pair([float(timeline.peak_live()[stage]) for timeline in both]),
    )


def _idle_share(timeline: Timeline, rank: int) -> float:
    return 1 - timeline.busy()[rank] / timeline.time if timeline.time > 0 else 0.0


def _mean(timeline: Timeline, stage: int, kind: Kind) -> float:
    own = timeline.work[(timeline.stages == stage) & (timeline.kinds == kind)]
    return float(own.mean()) if len(own) else 0.0


def comparison_table(comparison: Comparison) -> Table:
    """A row per stage and one for the mini-batch: predicted, measured, and how far the prediction is off."""
    table = Table(
        title=f"{comparison.schedule}: predicted → measured (error of the prediction)", title_justify="left"
    )
    table.add_column("stage", justify="right")
    for column in ("forward", "backward", "busy", "bubble", "live"):
        table.add_column(column, justify="right")
    for stage in comparison.stages:
        table.add_row(
            str(stage.stage),
            *(_seconds(pair) for pair in (stage.forward, stage.backward, stage.busy)),
            _share(stage.bubble),
            f"{stage.live.predicted:g} → {stage.live.measured:g}",
        )
    table.add_section()
    table.add_row("all", "", "time", _seconds(comparison.time), _share(comparison.bubble), "")
    return table


def _seconds(pair: Pair) -> str:
    error = "" if pair.error is None else f" ({pair.error:+.0%})"
    return f"{format_seconds(pair.predicted)} → {format_seconds(pair.measured)}{error}"


def _share(pair: Pair) -> str:
    return f"{pair.predicted:.1%} → {pair.measured:.1%}"
