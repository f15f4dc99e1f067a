"""Plans raced against each other: what was measured decides, not what was predicted. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import quantiles

from bapipe.analysis.calibrate import ShortRun, calibrate
from bapipe.analysis.recalibrate import predict_again, recalibrate
from bapipe.costs.profile import Profile
from bapipe.costs.profile_ways import of_way
from bapipe.errors import BaPipeError
from bapipe.planner import Exploration, explore, other_way_of, race_candidates, unraced_candidates
from bapipe.records.plan import Plan, gap_over
from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.trials.run_trials import Report, estimated_seconds, run_trials
from bapipe.torch.trials.trial_record import Trial
from bapipe.units import format_seconds

__all__ = ["RaceResult", "race", "race_found", "with_measured_time"]

_TIMES = 2
"""each plan runs so often, in turns, so that a machine whose speed drifts treats all alike"""
_FURTHER_ROUNDS = 2
"""times that plans which the runs so far speak for are raced against the fastest"""
_AS_FAST = 0.01
"""share of its time by which a plan that was preferred before the race may always be slower and still be kept"""
_FEWEST = 4
"""steps from which on the error of their median is known"""
_ERRORS = 1.5
"""standard errors of both medians by which it may, if that is more"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RaceResult:
    """Which plan was fastest, and what every one took."""

    best: Trial
    trials: tuple[Trial, ...]
    """fastest first; those that failed last"""


def race(plans: Sequence[Plan], options: RunOptions, *, code: Path) -> RaceResult:
    """Run every plan for a few steps and choose the fastest; of those as fast, the first in the list."""
    trials = run_trials(plans, options, code=code, times=_TIMES)
    timed = [(trial.seconds, index) for index, trial in enumerate(trials) if trial.seconds is not None]
    if not timed:
        reason = next((trial.failure for trial in trials if trial.failure), "none was tried")
        raise BaPipeError(f"no plan could be run: {reason}")
    fastest = min(timed)
    chosen = min(index for _, index in timed if _as_fast(trials[index], trials[fastest[1]]))
    return RaceResult(best=trials[chosen], trials=_ordered(trials))


def race_found(
    found: Exploration, options: RunOptions, *, limit: int, code: Path, report: Report | None = None
) -> RaceResult | None:
    """Race at most so many plans of a search that may be the fastest; None where only the chosen one may be.

    Their runs say more of layers and links than was known before. Where the search with that finds other plans
    that may be faster, these are raced against the fastest, and once more with what their runs say. They run
    compiled, or as captured, as the fastest so far does.
    """
    plans = race_candidates(found, limit=limit)
    if len(plans) == 1:
        return None
    say = report or _silent
    say(f"racing {len(plans)} plans whose predictions lie within error of each other, {_about(plans)}")
    result = race(plans, options, code=code)
    for _ in range(_FURTHER_ROUNDS):
        others = _unraced(found, result, limit - 1)
        if not others:
            break
        again = [result.best.plan, *others]
        more = f"{len(others)} more plan{'s' if len(others) > 1 else ''}"
        say(f"racing the fastest with {more} that may be faster, judging by these runs, {_about(again)}")
        before = [trial for trial in result.trials if trial.plan is not result.best.plan]
        last = race(again, options, code=code)
        result = RaceResult(best=last.best, trials=_ordered([*last.trials, *before]))
    return result


def _unraced(found: Exploration, result: RaceResult, limit: int) -> tuple[Plan, ...]:
    """At most so many plans that may be faster than the fastest raced one, by what all runs so far say."""
    assert result.best.seconds is not None
    other = other_way_of(found)
    way = found if other is None or result.best.plan.compiled == found.compiled else other
    alike = [trial for trial in result.trials if trial.plan.compiled == way.compiled]
    runs = [
        ShortRun(plan=trial.plan, records=trial.records, seconds=trial.seconds)
        for trial in alike
        if trial.seconds is not None and trial.plan.schedule.flushes
    ]
    known = calibrate(way.profile, way.hardware.cluster, runs)
    again = explore(known.profile, known.cluster, way.request)
    raced = [trial.plan for trial in alike]
    return unraced_candidates(way, again, raced, beat=result.best.seconds, limit=limit)


def _about(plans: Sequence[Plan]) -> str:
    return f"about {estimated_seconds(plans, _TIMES):.0f} s"


def _silent(_line: str) -> None:
    pass


def _ordered(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """The fastest first, those that failed last."""
    return tuple(sorted(trials, key=lambda trial: trial.seconds or math.inf))


def _as_fast(trial: Trial, fastest: Trial) -> bool:
    """Whether the steps of both do not tell them apart."""
    assert trial.seconds is not None
    assert fastest.seconds is not None
    error = _ERRORS * math.hypot(_error(trial), _error(fastest))
    return trial.seconds - fastest.seconds <= max(error, _AS_FAST * fastest.seconds)


def _error(trial: Trial) -> float:
    """The standard error of the median step, from the quartiles' distance of a normal distribution."""
    steps = trial.steps()
    if len(steps) < _FEWEST:
        return 0.0
    low, _, high = quantiles(steps, n=4)
    return 1.25 * (high - low) / 1.35 / math.sqrt(len(steps))


def with_measured_time(trial: Trial, profile: Profile) -> Plan:
    """The plan with the stage times that its own runs had by this profile's layers, and the step that was measured
    as its prediction."""
    plan = trial.plan
    if trial.seconds is None:
        return plan
    own = of_way(profile, compiled=plan.compiled)
    found = predict_again(plan, recalibrate(plan, trial.records[-1], own).profile)
    before = format_seconds(plan.prediction.time)
    steps = trial.steps()
    prediction = replace(
        plan.prediction,
        time=trial.seconds,
        throughput=plan.global_batch / trial.seconds,
        gap=gap_over(plan.prediction.lower_bound, trial.seconds),
        low=min(steps),
        high=max(steps),
    )
    took = f"a step took {format_seconds(trial.seconds)}"
    note = f"raced: {took}, {before} were predicted; alternatives are predictions"
    return replace(found, profile_hash=plan.profile_hash, prediction=prediction, notes=(*plan.notes, note))
