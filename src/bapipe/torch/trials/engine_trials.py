"""A plan run by every engine in turn, for `bapipe compare --engines`. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bapipe.records.plan import Plan
from bapipe.torch.launch.launcher import check_run
from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.runtime.engines import ENGINES, refusal
from bapipe.torch.trials.run_trials import run_trials

__all__ = ["EngineTime", "engine_times", "largest_loss_difference"]

_TIMES = 2
"""each engine runs so often, in turns, so that a machine whose speed drifts treats both alike"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTime:
    """How one engine ran one plan."""

    plan: str
    """the plan's file"""
    engine: str
    """bapipe or torch"""
    seconds: float | None
    """the median step; None: it did not run"""
    throughput: float | None
    """samples per second"""
    losses: tuple[float, ...] = ()
    """of the steps of one run, all with the first weights"""
    reason: str | None = None
    """why it did not run"""


def engine_times(path: str | Path, options: RunOptions) -> tuple[EngineTime, ...]:
    """Run the plan for a few steps by each engine that can, on this machine, with the same data and weights."""
    runnable = check_run(path, options)
    plan = runnable.plan
    refused = {engine: refusal(plan, runnable.schedule, engine, compiled=options.compiled) for engine in ENGINES}
    chosen = [engine for engine in ENGINES if refused[engine] is None]
    trials = run_trials(
        [plan] * len(chosen), options, code=Path(path).resolve().parent, times=_TIMES, engines=chosen
    )
    by_engine = dict(zip(chosen, trials, strict=True))
    found = []
    for engine in ENGINES:
        trial = by_engine.get(engine)
        seconds = None if trial is None else trial.seconds
        found.append(
            EngineTime(
                plan=str(path),
                engine=engine,
                seconds=seconds,
                throughput=None if seconds is None else _throughput(plan, seconds),
                losses=() if trial is None or not trial.records else _losses(trial.records[0].steps),
                reason=refused[engine] if trial is None else trial.failure,
            )
        )
    return tuple(found)


def _throughput(plan: Plan, seconds: float) -> float:
    return plan.global_batch / seconds


def _losses(steps: Sequence[object]) -> tuple[float, ...]:
    values = [getattr(step, "loss", None) for step in steps]
    return tuple(float("nan") if value is None else float(value) for value in values)


def largest_loss_difference(times: Sequence[EngineTime]) -> float | None:
    """How far the losses of one plan differ between engines, relative to the loss; None: fewer than two ran."""
    ran = [item.losses for item in times if item.losses]
    if len(ran) < 2:
        return None
    return max(abs(one - other) / max(abs(one), 1e-30) for one, other in zip(ran[0], ran[1], strict=True))
