"""What a user's own typed code looks like: mypy --strict must accept it, with BaPipe as an installed package."""

from __future__ import annotations

from pathlib import Path

import bapipe
from bapipe import Costs, Plan, Profile, Schedule, Timeline, make_schedule, simulate


def fastest(names: list[str]) -> tuple[str, float]:
    costs: Costs = Costs.of(4, forward=10, backward=20, transfer=5)
    times: dict[str, float] = {}
    for name in names:
        schedule: Schedule = make_schedule(name, 4, 16)
        timeline: Timeline = simulate(schedule, costs)
        times[name] = timeline.time
    best = min(times, key=lambda name: times[name])
    return best, times[best]


def planned(model: str | Profile, folder: Path) -> float:
    plan: Plan = bapipe.plan(model, "4xv100", global_batch=256)
    bapipe.write_plan(plan, folder / "plan.json")
    again: Plan = bapipe.read_plan(folder / "plan.json")
    bapipe.write_report(again, folder / "report.html")
    names: list[str] = [stage.accelerators[0] for stage in again.stages]
    assert names
    return again.prediction.throughput


def wrong() -> None:
    bapipe.plan("bert-large", "4xv100", global_batch="many")
