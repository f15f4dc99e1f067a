"""DDP, FSDP2, our data parallelism and ZeRO-1 on two CPU ranks by gloo: predicted beside measured.

    python benchmarks/sharding/cpu.py --folder WORK            nothing else may run on the two cores
    python benchmarks/sharding/cpu.py --folder WORK --tiny     a rehearsal

Links are measured once. Each model is profiled as one of two ranks that train, planned for each engine, and every
plan is run in turn, several times. `WORK/cpu.json` has a row for each, with the load of the machine before it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from bapipe.records.plan import read_plan
from bapipe.records.run_record import read_run

BUILD = "bapipe.torch.zoo.gpt:build_gpt"
RANKS = 2
MODELS: dict[str, tuple[int, dict[str, int]]] = {
    "links": (1, {"blocks": 4, "width": 512, "heads": 8, "vocabulary": 8192, "sequence": 32}),
    "both": (4, {"blocks": 6, "width": 384, "heads": 6, "vocabulary": 4096, "sequence": 64}),
    "compute": (4, {"blocks": 6, "width": 256, "heads": 4, "vocabulary": 2048, "sequence": 256}),
}
"""what takes most of a step: samples of a micro-batch, and a GPT"""
TINY: dict[str, tuple[int, dict[str, int]]] = {
    "tiny": (1, {"blocks": 2, "width": 32, "heads": 2, "vocabulary": 64, "sequence": 8})
}
ENGINES = {
    "dp": ["--strategy", "dp", "--zero-stage", "0"],
    "zero": ["--strategy", "dp", "--zero-stage", "1"],
    "ddp": ["--strategy", "ddp"],
    "fsdp": ["--strategy", "fsdp"],
}
MICROBATCHES = 2
"""of each rank in a step"""
FIRST = 2
"""steps that are not counted: buckets are laid out anew after the first"""


def bapipe(folder: Path, *words: str) -> None:
    """Run a command, whose output goes to the log."""
    with (folder / "log.txt").open("a") as log:
        subprocess.run([sys.executable, "-m", "bapipe", *words], stdout=log, stderr=log, check=True)


def planned(folder: Path, model: str, size: int, shape: dict[str, int]) -> dict[str, Path]:
    """The model's plan for each engine."""
    profile, cluster = folder / f"profile-{model}.json", folder / "cluster.toml"
    if not cluster.exists():
        bapipe(folder, "profile", "--links", "--ranks", str(RANKS), "-o", str(cluster))
    if not profile.exists():
        given = [word for key, value in shape.items() for word in ("--arg", f"{key}={value}")]
        given += ["--arg", "dropout=0.0", "--micro-batch", str(size), "--ranks", str(RANKS)]
        given += ["--optimizer", "adam", "--optimizer-arg", "fused=true", "-o", str(profile)]
        bapipe(folder, "profile", BUILD, *given)
    plans = {}
    batch = ["--micro-batch", str(size), "--global-batch", str(size * RANKS * MICROBATCHES)]
    for engine, words in ENGINES.items():
        plans[engine] = folder / f"plan-{model}-{engine}.json"
        bapipe(
            folder, "plan", str(profile), "--cluster", str(cluster), *batch, *words, "--out", str(plans[engine])
        )
    return plans


def measured(folder: Path, plans: dict[str, Path], *, rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of the steps of each plan; plans take turns, so that what disturbs one disturbs all."""
    found: dict[str, list[float]] = {engine: [] for engine in plans}
    for _ in range(rounds):
        for engine, plan in plans.items():
            out = folder / "run.json"
            bapipe(folder, "run", str(plan), "--steps", str(FIRST + steps), "--out", str(out))
            found[engine] += [step.seconds for step in read_run(out).steps[FIRST:]]
    return found


def rows_of(folder: Path, model: str, size: int, shape: dict[str, int], *, rounds: int) -> list[dict[str, Any]]:
    """A row for each engine."""
    load = os.getloadavg()[0]
    plans = planned(folder, model, size, shape)
    seconds = measured(folder, plans, rounds=rounds, steps=5)
    rows = []
    for engine, plan in plans.items():
        predicted, found = read_plan(plan).prediction.time, median(seconds[engine])
        rows.append(
            {
                "model": model,
                "engine": engine,
                "seconds": found,
                "least": min(seconds[engine]),
                "most": max(seconds[engine]),
                "predicted": predicted,
                "error": predicted / found - 1,
                "load": load,
            }
        )
        print(
            f"{model} {engine}: {predicted:.3f} s predicted, {found:.3f} s measured, load {load:.1f}", flush=True
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--models", default=",".join(MODELS), help="separated by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    models = TINY if given.tiny else {name: MODELS[name] for name in given.models.split(",")}
    rows: list[dict[str, Any]] = []
    for name, (size, shape) in models.items():
        rows += rows_of(given.folder, name, size, shape, rounds=1 if given.tiny else given.rounds)
        (given.folder / "cpu.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
