"""Some plans of one model, each run by BaPipe for a few steps: `python our_trials.py JOBS`, as run.py writes them.

What each run took is written to the job's file, or why it failed. A plan that fails after others in the same
processes is tried again in processes of its own, before that counts.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import turns

from bapipe.errors import BaPipeError
from bapipe.records.plan import read_plan
from bapipe.records.run_record import write_run
from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.trials.run_trials import run_trials
from bapipe.torch.trials.trial_record import Trial

HERE = Path(__file__).resolve().parent


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    os.environ[turns.VARIABLE] = asked["turn"] or ""
    options = RunOptions(transport=asked["transport"], timeout=asked["timeout"])
    jobs, plans = asked["jobs"], [read_plan(job["plan"]) for job in asked["jobs"]]

    def run(numbers: list[int]) -> tuple[Trial, ...]:
        own = [plans[number] for number in numbers]
        return run_trials(own, options, code=Path(asked["code"]), worker=[str(HERE / "our_rank.py")])

    found = dict(enumerate(run(list(range(len(jobs))))))
    for number in [number for number, trial in found.items() if trial.failure is not None and number]:
        try:
            found[number] = run([number])[0]
        except BaPipeError as error:
            found[number] = Trial(plan=plans[number], failure=str(error))
    for number, job in enumerate(jobs):
        Path(job["out"]).write_text(json.dumps(_told(found[number])), encoding="utf-8")
        if found[number].records:
            write_run(found[number].records[-1], Path(job["out"]).with_suffix(".record.json"))


def _told(trial: Trial) -> dict[str, Any]:
    if not trial.records:
        return {"error": trial.failure or "it left no record"}
    record = trial.records[-1]
    return {
        "seconds": [step.seconds for step in record.steps],
        "losses": [step.loss for step in record.steps],
        "memory": list(record.peak_memory),
        "transport": record.environment.transport,
    }


if __name__ == "__main__":
    main()
