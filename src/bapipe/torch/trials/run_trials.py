"""Several plans of one model, each run for a few steps by the ranks of one launch. Imports no torch."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from bapipe.records.plan import Plan
from bapipe.torch.launch.launcher import attempt, check_gpus
from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.runtime.plan_checks import check_plan
from bapipe.torch.trials.trial_record import Trial, read_result, write_jobs

__all__ = ["WORKER", "estimated_seconds", "run_trials", "steps_for"]

_SECONDS = 1.5
"""to spend on the timed steps of one plan, about"""
_LEAST, _MOST = 3, 24
"""timed steps of one plan"""
WORKER = ("-m", "bapipe.torch.trials.trial_worker")
"""what Python runs as a rank of trials"""
_START = 12.0
"""seconds to start the ranks and capture the model, for estimates"""

Report = Callable[[str], None]
"""called with what is being tried"""


def run_trials(
    plans: Sequence[Plan],
    options: RunOptions,
    *,
    code: Path,
    times: int = 1,
    engines: Sequence[str] | None = None,
    report: Report | None = None,
    worker: Sequence[str] = WORKER,
) -> tuple[Trial, ...]:
    """Run each plan for a few steps on this machine, and say how long a step takes.

    All plans are of one model. Those with ranks on the same types of accelerators are run by the same processes,
    which build and capture the model once; `times` over the list, so that a machine whose speed drifts treats all
    alike. A plan that fails, by lack of memory or otherwise, is a trial with its reason; the others are run all
    the same. `code` is where to look for the model's code first, `engines` what runs each plan's stages, and
    `worker` what Python runs as a rank, with the arguments of trial_worker.
    """
    done: dict[int, Trial] = {index: Trial(plan=plan) for index, plan in enumerate(plans)}
    by_ranks: dict[tuple[str, ...], list[int]] = {}
    for index, plan in enumerate(plans):
        types = {item.name: item.type for item in plan.cluster.accelerators}
        by_ranks.setdefault(tuple(types[name] for name in plan.ranks), []).append(index)
    for own in by_ranks.values():
        check_gpus(plans[own[0]], options.device)
        waiting = [index for _ in range(times) for index in own]
        while waiting:
            if report is not None:
                report(f"{len(set(waiting))} plans on {len(plans[waiting[0]].ranks)} ranks")
            ways = engines or [options.engine] * len(plans)
            waiting = _launch(plans, waiting, options, code, done, ways, worker)
    return tuple(done[index] for index in range(len(plans)))


def _launch(
    plans: Sequence[Plan],
    waiting: list[int],
    options: RunOptions,
    code: Path,
    done: dict[int, Trial],
    engines: Sequence[str],
    worker: Sequence[str],
) -> list[int]:
    """Run what waits; what is still to be run after a plan that failed."""
    with tempfile.TemporaryDirectory(prefix="bapipe-trials-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        write_jobs(folder, [(plans[index], steps_for(plans[index]), engines[index]) for index in waiting])
        words = [*worker, name, options.to_json(), "--code", str(code)]
        failure = attempt(check_plan(plans[waiting[0]]), words, timeout=options.timeout)
        for number, index in enumerate(waiting):
            record = read_result(folder, number)
            if record is None:
                reason = failure.line if failure is not None else "it left no record"
                done[index] = Trial(plan=plans[index], failure=reason)
                return [other for other in waiting[number + 1 :] if other != index]
            known = done[index]
            done[index] = Trial(plan=known.plan, records=(*known.records, record), failure=known.failure)
    return []


def steps_for(plan: Plan) -> int:
    """Steps to run of a plan: a warm-up, and as many as take about a second and a half."""
    wanted = math.ceil(_SECONDS / max(plan.prediction.time, 1e-6))
    return 1 + min(_MOST, max(_LEAST, wanted))


def estimated_seconds(plans: Sequence[Plan], times: int = 1) -> float:
    """About how long it takes to try the plans so often."""
    return _START + times * sum(steps_for(plan) * plan.prediction.time for plan in plans)
