"""Schedules as files: BaPipe's JSON, and the CSV of torch.distributed.pipelining in and out."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from bapipe.errors import FileFormatError, ScheduleError
from bapipe.io.files import dump_json, read_text, read_versioned, unless_default, write_text
from bapipe.schedule.actions import Action, Concurrency, Kind, Lane, Schedule, Sending
from bapipe.schedule.dealing import copied_dealing, require_dealing
from bapipe.schedule.replicas import first_replica

__all__ = [
    "SCHEDULE_SCHEMA",
    "LaneFile",
    "ScheduleFile",
    "from_torch_csv",
    "read_schedule",
    "schedule_text",
    "to_torch_csv",
    "write_schedule",
]

SCHEDULE_SCHEMA = "bapipe.schedule/1"
_MOST_STAGES, _MOST_MICROBATCHES = 10_000, 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneFile:
    """One lane of a rank: its actions in order, each like `2F0`."""

    rank: int
    name: str = "compute"
    actions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleFile:
    """A Schedule as it stands in JSON; the fields mean what they mean there."""

    schema: Literal["bapipe.schedule/1"] = "bapipe.schedule/1"
    name: str
    stages: int
    microbatches: int
    placement: tuple[tuple[int, ...], ...]
    caps: tuple[int, ...] | None = None
    sending: Sending = "after-compute"
    concurrency: Concurrency = "none"
    weight_versions: tuple[int, ...] | None = None
    flushes: bool = True
    copies: int = 1
    """replicas of the pipeline whose lanes are listed: a lane stands for so many, of which the k-th, from 0, has
    its rank and its micro-batches plus k; placement, caps and microbatches are those of all"""
    dealing: tuple[tuple[int, ...], ...] | None = unless_default(None)
    """for each stage, which of its replicas take which micro-batches, over and over; empty: in turn; not written
    where all stages deal in turn. Of copies, which take micro-batches in turn, that of one"""
    lanes: tuple[LaneFile, ...]

    @classmethod
    def of(cls, schedule: Schedule, *, copies: int = 1) -> ScheduleFile:
        """`copies` are replicas of the whole (`bapipe.schedule.replicas`), written as one."""
        if copies > 1:
            return _of_copies(schedule, copies)
        return cls(
            name=schedule.name,
            stages=schedule.num_stages,
            microbatches=schedule.num_microbatches,
            placement=schedule.placement,
            caps=schedule.caps,
            sending=schedule.sending,
            concurrency=schedule.concurrency,
            weight_versions=schedule.weight_versions,
            flushes=schedule.flushes,
            dealing=schedule.dealing,
            lanes=tuple(
                LaneFile(rank=lane.rank, name=lane.name, actions=tuple(str(action) for action in lane))
                for lane in schedule.lanes
            ),
        )

    def to_schedule(self) -> Schedule:
        """The schedule; sizes and numbers are checked here, its logic by `bapipe.schedule.validate`."""
        for what, value, most in (
            ("stages", self.stages, _MOST_STAGES),
            ("microbatches", self.microbatches, _MOST_MICROBATCHES),
        ):
            if not 1 <= value <= most:
                shown = str(value)[:20]
                raise ScheduleError(f"{what} must lie between 1 and {most}, got {shown}; correct the schedule")
        # What lacks a few actions is for the checker; what lacks almost all would only keep it busy.
        if not 1 <= self.copies <= _MOST_STAGES:
            raise ScheduleError(f"copies must lie between 1 and {_MOST_STAGES}, got {self.copies}; correct it")
        present = self.copies * sum(len(lane.actions) for lane in self.lanes)
        if self.stages * self.microbatches > present + 10_000:
            raise ScheduleError(
                f"{self.stages} stages with {self.microbatches} micro-batches need at least "
                f"{2 * self.stages * self.microbatches} actions, got {present}; is the file cut off?"
            )
        if len(self.placement) != self.stages or not all(self.placement):
            raise ScheduleError(
                f"placement must list the ranks of each of {self.stages} stages, got {len(self.placement)} lists"
            )
        for name, counts in (("caps", self.caps), ("weight_versions", self.weight_versions)):
            if counts is not None and (len(counts) != self.stages or min(counts) < 1):
                raise ScheduleError(f"{name} must be {self.stages} numbers of at least 1, one per stage")
        ranks = {rank for stage in self.placement for rank in stage}
        if len(ranks) > _MOST_STAGES:
            raise ScheduleError(f"at most {_MOST_STAGES} ranks are possible, got {len(ranks)}; correct placement")
        if min(ranks) < 0 or ranks != set(range(len(ranks))):
            raise ScheduleError(f"ranks must be 0 to {len(ranks) - 1} without a gap, got {sorted(ranks)[:8]}")
        self._require_dealing()
        lanes, more = [], self.copies - 1
        for lane in self.lanes:
            if lane.rank not in ranks or lane.rank + more not in ranks:
                raise ScheduleError(f"a lane belongs to rank {lane.rank}, which has no stage; correct its rank")
            actions = [Action.parse(text) for text in lane.actions]
            for action in actions:
                if action.stage >= self.stages or (action.microbatch or 0) + more >= self.microbatches:
                    raise ScheduleError(
                        f"rank {lane.rank}: {action} is outside {self.stages} stages and "
                        f"{self.microbatches} micro-batches; correct the action or the sizes"
                    )
            lanes += _copied(Lane.of(lane.rank, actions, name=lane.name), self.copies)
        return Schedule(
            name=self.name,
            num_stages=self.stages,
            num_microbatches=self.microbatches,
            placement=self.placement,
            lanes=tuple(lanes) if self.copies == 1 else tuple(sorted(lanes, key=lambda lane: lane.rank)),
            caps=self.caps,
            sending=self.sending,
            concurrency=self.concurrency,
            weight_versions=self.weight_versions,
            flushes=self.flushes,
            dealing=self._whole_dealing(),
        )

    def _whole_dealing(self) -> tuple[tuple[int, ...], ...] | None:
        """How micro-batches are dealt to the replicas of all copies."""
        if self.dealing is None or self.copies == 1:
            return self.dealing
        known = {own: copied_dealing(own, self.copies) for own in self.dealing}
        return tuple(known[own] for own in self.dealing)

    def _require_dealing(self) -> None:
        if self.dealing is None:
            return
        if len(self.dealing) != self.stages:
            raise ScheduleError(
                f"dealing must list the replicas of each of {self.stages} stages, got {len(self.dealing)} lists; "
                "correct it"
            )
        for stage, own in enumerate(self.dealing):
            replicas, microbatches = len(self.placement[stage]) // self.copies, self.microbatches // self.copies
            require_dealing(own, replicas, microbatches, stage=stage)


def _of_copies(schedule: Schedule, copies: int) -> ScheduleFile:
    """So many replicas of a pipeline, by the lanes of the first."""
    return replace(ScheduleFile.of(first_replica(schedule, copies)), copies=copies, dealing=schedule.dealing)


def _copied(lane: Lane, copies: int) -> list[Lane]:
    """The lane of every copy; they share what is alike."""
    none = lane.microbatches < 0
    others = [
        replace(lane, rank=lane.rank + copy, microbatches=np.where(none, -1, lane.microbatches + copy))
        for copy in range(1, copies)
    ]
    return [lane, *others]


def read_schedule(path: str | Path) -> Schedule:
    """The one reader of schedule files: `.csv` is torch's, anything else BaPipe's JSON."""
    if str(path).endswith(".csv"):
        return from_torch_csv(read_text(path), name=Path(path).stem)
    return read_versioned(ScheduleFile, path, schema=SCHEDULE_SCHEMA).to_schedule()


def schedule_text(schedule: Schedule, path: str | Path) -> str:
    """What `path` would hold: torch's CSV if it ends so, otherwise BaPipe's JSON."""
    return to_torch_csv(schedule) if str(path).endswith(".csv") else dump_json(ScheduleFile.of(schedule))


def write_schedule(schedule: Schedule, path: str | Path) -> None:
    """Write a schedule file: `.csv` as torch's, anything else as BaPipe's JSON."""
    write_text(path, schedule_text(schedule, path))


def to_torch_csv(schedule: Schedule) -> str:
    """torch's compute-only CSV: a row per rank, an action per cell. It has no R, A, U, replicas or lanes."""
    if any(len(ranks) > 1 for ranks in schedule.placement):
        raise ScheduleError("torch's CSV cannot hold replicated stages; write JSON instead")
    rows: list[list[str]] = [[] for _ in range(schedule.num_ranks)]
    for lane in schedule.lanes:
        if rows[lane.rank]:
            raise ScheduleError(
                f"torch's CSV has one lane per rank, rank {lane.rank} has more; write JSON instead"
            )
        for action in lane:
            if action.kind in (Kind.R, Kind.A, Kind.U):
                raise ScheduleError(f"torch's CSV has no action {action}; write JSON instead")
            rows[lane.rank].append(str(action))
    output = io.StringIO()
    csv.writer(output, lineterminator="\n").writerows(rows)
    return output.getvalue()


def from_torch_csv(text: str, *, name: str = "torch") -> Schedule:
    """A schedule from torch's compute-only CSV; empty cells are bubbles and are left out."""
    rows: list[list[Action]] = []
    try:
        for row in csv.reader(io.StringIO(text)):
            if row:
                rows.append([Action.parse(cell) for cell in row if cell.strip() not in ("", "None")])
    except csv.Error as error:
        raise FileFormatError(f"this is not torch's schedule CSV: {error}") from None
    actions = [action for row in rows for action in row]
    if not actions:
        raise ScheduleError("the schedule file has no actions; give one row of actions per rank")
    stages = 1 + max(action.stage for action in actions)
    microbatches = 1 + max(action.microbatch or 0 for action in actions)
    return ScheduleFile(
        name=name,
        stages=stages,
        microbatches=microbatches,
        placement=_placement(rows, stages),
        lanes=tuple(LaneFile(rank=rank, actions=tuple(map(str, row))) for rank, row in enumerate(rows)),
    ).to_schedule()


def _placement(rows: Iterable[list[Action]], stages: int) -> tuple[tuple[int, ...], ...]:
    owner: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            if owner.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"stage {action.stage} is on rank {owner[action.stage]} and on rank {rank}; keep it on one"
                )
    missing = next((stage for stage in range(stages) if stage not in owner), None)
    if missing is not None:
        raise ScheduleError(f"stage {missing} has no actions; add its row")
    return tuple((owner[stage],) for stage in range(stages))
