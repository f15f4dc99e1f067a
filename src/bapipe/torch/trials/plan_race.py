"""Plans raced against each other: what was measured decides, not what was predicted. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bapipe.analysis.recalibrate import predict_again, recalibrate
from bapipe.costs.profile import Profile
from bapipe.errors import BaPipeError
from bapipe.records.plan import Plan
from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.trials.run_trials import Report, run_trials
from bapipe.torch.trials.trial_record import Trial
from bapipe.units import format_seconds

__all__ = ["RaceResult", "race", "with_measured_time"]

_TIMES = 2
"""each plan runs so often, in turns, so that a machine whose speed drifts treats all alike"""
_AS_FAST = 0.01
"""share of its time by which a plan that was preferred before the race may be slower and still be kept: no race on
a machine with other work is closer"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RaceResult:
    """Which plan was fastest, and what every one took."""

    best: Trial
    trials: tuple[Trial, ...]
    """fastest first; those that failed last"""


def race(plans: Sequence[Plan], options: RunOptions, *, code: Path, report: Report | None = None) -> RaceResult:
    """Run every plan for a few steps and choose the fastest; of those as fast, the first in the list."""
    trials = run_trials(plans, options, code=code, times=_TIMES, report=report)
    timed = [(trial.seconds, index) for index, trial in enumerate(trials) if trial.seconds is not None]
    if not timed:
        reason = next((trial.failure for trial in trials if trial.failure), "none was tried")
        raise BaPipeError(f"no plan could be run: {reason}")
    limit = min(timed)[0] * (1 + _AS_FAST)
    chosen = min(index for seconds, index in timed if seconds <= limit)
    order = sorted(range(len(trials)), key=lambda index: (trials[index].seconds or float("inf"), index))
    return RaceResult(best=trials[chosen], trials=tuple(trials[index] for index in order))


def with_measured_time(trial: Trial, profile: Profile) -> Plan:
    """The plan with the stage times that its own runs had by this profile's layers, and the step that was measured
    as its prediction."""
    plan = trial.plan
    if trial.seconds is None:
        return plan
    found = predict_again(plan, recalibrate(plan, trial.records[-1], profile).profile)
    before = format_seconds(plan.prediction.time)
    steps = [step.seconds for record in trial.records for step in record.steps[1:]] or [trial.seconds]
    prediction = replace(
        plan.prediction,
        time=trial.seconds,
        throughput=plan.minibatch / trial.seconds,
        gap=trial.seconds / plan.prediction.lower_bound - 1,
        low=min(steps),
        high=max(steps),
    )
    note = f"raced: a step took {format_seconds(trial.seconds)}, {before} were predicted before"
    return replace(found, profile_hash=plan.profile_hash, prediction=prediction, notes=(*plan.notes, note))
