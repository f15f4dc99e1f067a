"""What is tried, and what came of it: files between the process that asks and the ranks. Uses no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bapipe.io.files import dump_json, read_versioned, write_text
from bapipe.records.plan import Plan, read_plan, write_plan
from bapipe.records.run_record import RunRecord, read_run

__all__ = [
    "TRIALS_SCHEMA",
    "Trial",
    "TrialJob",
    "TrialList",
    "read_jobs",
    "read_result",
    "result_file",
    "write_jobs",
]

TRIALS_SCHEMA = "bapipe.trials/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialJob:
    """A plan to run for some steps."""

    plan: str
    """the plan's file, in the same folder"""
    steps: int
    """the first is a warm-up"""
    engine: str = "bapipe"
    """what runs its stages"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialList:
    """What the ranks of one launch run, one after another."""

    schema: str = TRIALS_SCHEMA
    jobs: tuple[TrialJob, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trial:
    """A plan and how it ran."""

    plan: Plan
    records: tuple[RunRecord, ...] = ()
    """one for each time it ran; (): it failed"""
    failure: str | None = None
    """why it could not be run"""

    @property
    def seconds(self) -> float | None:
        """The median step, warm-ups left out; None: it did not run."""
        steps = self.steps()
        return median(steps) if steps else None

    def steps(self) -> list[float]:
        """Seconds of every step, warm-ups left out."""
        return [step.seconds for record in self.records for step in record.steps[1:] or record.steps]

    @property
    def error(self) -> float | None:
        """By how much of it the step is longer than predicted."""
        return None if self.seconds is None else self.seconds / self.plan.prediction.time - 1


def write_jobs(folder: Path, plans: list[tuple[Plan, int, str]]) -> None:
    """Write plans, their steps and their engines to a folder, for the ranks."""
    jobs = []
    for number, (plan, steps, engine) in enumerate(plans):
        name = f"plan-{number}.json"
        write_plan(plan, folder / name)
        jobs.append(TrialJob(plan=name, steps=steps, engine=engine))
    write_text(folder / "trials.json", dump_json(TrialList(jobs=tuple(jobs))))


def read_jobs(folder: Path) -> list[tuple[Plan, int, str]]:
    """What `write_jobs` wrote."""
    found = read_versioned(TrialList, folder / "trials.json", schema=TRIALS_SCHEMA)
    return [(read_plan(folder / job.plan), job.steps, job.engine) for job in found.jobs]


def result_file(folder: Path, number: int) -> Path:
    """Where the record of a job goes."""
    return folder / f"run-{number}.json"


def read_result(folder: Path, number: int) -> RunRecord | None:
    """The record of a job; None where it did not end."""
    path = result_file(folder, number)
    return read_run(path) if path.exists() else None
