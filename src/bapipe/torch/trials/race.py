"""Plans raced against each other: what was measured decides, not what was predicted. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bapipe.errors import BaPipeError
from bapipe.records.plan import Plan
from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.trials.run_trials import Report, run_trials
from bapipe.torch.trials.trial_record import Trial

__all__ = ["RaceResult", "race"]

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
