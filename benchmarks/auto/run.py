"""`bapipe auto` on models of the transformers library: predicted before the race, raced, and against more plans.

    python benchmarks/auto/run.py                    # all models, two CPU ranks: some 20 minutes on two cores
    python benchmarks/auto/run.py vit t5

Each model goes through `auto` without a manual step. Then the best plans of other families are raced with the
chosen one, so that "the fastest" is not only that of the plans which `auto` itself tried. At last the chosen plan
trains three steps with every gradient compared to one process. result.json and result.md have the figures.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from bapipe.planner import make_plan
from bapipe.records.plan import write_plan
from bapipe.records.run_record import read_run
from bapipe.torch.launch.run_options import RunOptions
from bapipe.torch.profiler.environment import cpu_name
from bapipe.torch.trials.auto import auto
from bapipe.torch.trials.auto_options import AutoOptions
from bapipe.torch.trials.run_trials import run_trials

HERE = Path(__file__).resolve().parent
MODELS = ("t5", "vit", "deberta", "convnextv2", "segformer", "mixtral")
BATCH = 32
MOST = 5
"""plans that are raced at the end"""
ROUNDS = 6
"""times that each of these runs then, in turns: two are told apart better than in the race of `auto` itself"""


def measure(model: str, folder: Path) -> dict[str, Any]:
    """One model from nothing to a trained plan."""
    options = AutoOptions(folder=folder, global_batch=BATCH, ranks=2, device="cpu")
    found = auto(f"models:{model}", options)
    before = found.predicted.prediction.time
    close = [item for item in found.exploration.considered if item.short is None]
    others = [make_plan(replace(found.exploration, best=item)) for item in close]
    plans = [found.plan, *[plan for plan in others if plan.stages != found.plan.stages][: MOST - 1]]
    trials = run_trials(plans, RunOptions(device="cpu"), code=HERE, times=ROUNDS)
    chosen, rounds = trials[0].seconds, [replace(trials[0], records=(own,)).seconds for own in trials[0].records]
    predicted = {trial.plan.schedule.name: trial.error for trial in trials if trial.error is not None}
    first = None if found.raced is None else found.raced.trials
    own = next((trial.seconds for trial in first or () if trial.plan.stages == found.predicted.stages), chosen)
    write_plan(found.plan, folder / "plan.json")
    command = [sys.executable, "-m", "bapipe", "run", str(folder / "plan.json"), "--steps", "3", "--check"]
    subprocess.run([*command, "--out", str(folder / "run.json")], cwd=HERE, check=True, stdout=subprocess.DEVNULL)
    check = read_run(folder / "run.json").check
    assert check is not None
    return {
        "model": model,
        "chosen": f"{found.plan.schedule.name}, {len(found.plan.stages)} stages, b={found.plan.microbatch_size}",
        "predicted_before": before,
        "measured_in_race": own,
        "off_before_race": own / before - 1 if own else None,
        "measured": chosen,
        "fastest": min(trial.seconds for trial in trials if trial.seconds is not None),
        "rounds": rounds,
        "errors_by_schedule": predicted,
        "gradient_difference": check.gradient_difference,
        "compared": check.compared,
        "passed": check.passed,
    }


def main() -> None:
    names = sys.argv[1:] or MODELS
    sys.path.insert(0, str(HERE))
    os.chdir(HERE)  # where the ranks look for models.py
    environment = {
        "machine": cpu_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "ranks": 2,
        "global_batch": BATCH,
    }
    rows = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="bapipe-auto-") as folder:
            rows.append(measure(name, Path(folder)))
        print(json.dumps(rows[-1]), flush=True)
        text = json.dumps({"environment": environment, "rows": rows}, indent=1)
        (HERE / "result.json").write_text(f"{text}\n")
        (HERE / "result.md").write_text(table(environment, rows))


def table(environment: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    lines = [", ".join(f"{key} {value}" for key, value in environment.items()), ""]
    lines += ["| model | chosen | predicted before the race | measured | off by | over the fastest | gradients |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['model']} | {row['chosen']} | {1e3 * row['predicted_before']:.0f} ms "
            f"| {1e3 * row['measured_in_race']:.0f} ms | {row['off_before_race']:+.1%} "
            f"| {row['measured'] / row['fastest'] - 1:.1%} "
            f"| {row['gradient_difference']:.1e} ({row['compared']}) |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
