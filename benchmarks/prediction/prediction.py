"""Two CPU ranks on two cores: the mini-batch time that a profile predicts beside the one that a run takes.

    .venv/bin/python benchmarks/prediction/prediction.py [--models vgg16,gpt] [--steps 5]

Profiles each model on one thread, plans it for two ranks, runs the plan and compares; no recalibration. Writes
result.json beside this script.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bapipe.analysis.predicted_measured import compare
from bapipe.records.plan import read_plan
from bapipe.records.run_record import read_run

FOLDER = Path(__file__).resolve().parent
CLUSTER = FOLDER.parents[1] / "examples" / "cluster-two-cpus.toml"
MODELS = {
    "vgg16": ["--arg", "with_loss=true"],
    "gpt": ["--arg", "with_loss=true", "--arg", "blocks=12", "--arg", "width=768", "--arg", "heads=12"],
}
"""the second is as wide and deep as GPT-2 small, with a vocabulary of 8192 and 128 tokens"""
MICROBATCH, GLOBAL_BATCH = 2, 16


def bapipe(*arguments: str) -> None:
    subprocess.run([str(Path(sys.executable).with_name("bapipe")), *arguments], check=True)


def measured(model: str, folder: Path, steps: int) -> dict[str, object]:
    profile, plan_file, run_file = (str(folder / f"{model}-{name}.json") for name in ("profile", "plan", "run"))
    size = str(MICROBATCH)
    bapipe("profile", model, *MODELS[model], "--threads", "1", "--microbatch", size, "-o", profile, "--fresh",
           "--type", "cpu-core")  # fmt: skip
    bapipe("plan", profile, "--cluster", str(CLUSTER), "--global-batch", str(GLOBAL_BATCH), "--microbatch", size,
           "--schedule", "1f1b-so", "--stages", "2", "--out", plan_file)  # fmt: skip
    bapipe("run", plan_file, "--steps", str(steps), "--out", run_file)
    plan, record = read_plan(plan_file), read_run(run_file)
    found = compare(plan, record)
    return {
        "model": model,
        "predicted": plan.prediction.time,
        "measured": found.step_seconds,
        "error": plan.prediction.time / found.step_seconds - 1,
        "stages": [[row.forward.predicted, row.forward.measured] for row in found.stages],
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [measured(model, Path(folder), options.steps) for model in options.models.split(",")]
    (FOLDER / "result.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    for row in rows:
        times = f"predicted {row['predicted']:.3f} s, measured {row['measured']:.3f} s"
        print(f"{row['model']}: {times}, {row['error']:+.1%}")


if __name__ == "__main__":
    main()
