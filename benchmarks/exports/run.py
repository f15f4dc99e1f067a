"""Exports of plans read by the engines that they are for, each in an environment of its own.

    python benchmarks/exports/run.py --environments FOLDER

Environments that FOLDER lacks are made there. Writes result.json and result.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import bapipe
from bapipe.exporters.export_plan import export_plan
from bapipe.exporters.targets import TARGETS
from bapipe.io.files import dump_json, write_text
from bapipe.models.layers import ModelRef
from bapipe.records.plan import Plan
from bapipe.torch.profiler import MeasureSettings, profile_model

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGES = {
    "torchtitan": (
        ["tyro", "datasets", "spmd_types==0.2.3"],
        [
            "torchtitan==0.3.0",
            "torch_checkpointing",
            "einops",
            "torchdata",
            "safetensors",
            "tokenizers",
            "tensorboard",
        ],
    ),
    "automodel": (["pyyaml", "transformers"], ["nemo-automodel==0.7.0"]),
    "megatron": (["megatron-core==0.16.1"], []),
    "deepspeed": (["deepspeed==0.19.8"], []),
    "device-map": (["accelerate==1.15.0", "transformers"], []),
}
"""environment -> packages with what they need, and packages without"""
SCHEDULES = {"1f1b-sno": {}, "gpipe": {}, "zb-h1": {}, "interleaved": {}}


def environment(folder: Path, name: str) -> Path:
    """The Python of that environment, made where it is not there."""
    python = folder / name / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder / name)], check=True)
        pip = [str(python), "-m", "pip", "install", "-q"]
        subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), "torch==2.13.0", "numpy"], check=True)
        whole, alone = PACKAGES[name]
        subprocess.run([*pip, "torch==2.13.0", *whole], check=True)
        if alone:
            subprocess.run([*pip, "--no-deps", *alone], check=True)
    return python


def planned(schedule: str, *, ranks: int = 3) -> Plan:
    """A plan of the decoder on so many CPU ranks."""
    sys.path.insert(0, str(HERE))
    settings = MeasureSettings(microbatches=(2,))
    common = {"device": "cpu", "precision": "fp32", "optimizer": "sgd", "accelerator": "cpu-core", "threads": 1}
    profile = profile_model("chains:decoder", args={}, settings=settings, **common).profile
    cluster = bapipe.detect_cluster(ranks=ranks)
    stages = None if schedule == "interleaved" else ranks
    return bapipe.plan(profile, cluster, global_batch=24, micro_batch=2, schedule=schedule, stages=stages)


def by_torch(plan: Plan, folder: Path) -> dict[str, object]:
    """Train by the script, each rank beside a single process."""
    made = export_plan(plan, "torch", out=str(folder / "train.py"))
    write(made.files)
    ranks = len(plan.ranks)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        str(folder / "train.py"),
    ]
    out = started([*command, "--steps", "3", "--check"], folder)
    found = re.findall(r"gradients of (\d+) of (\d+) weights differ by at most ([0-9.e+-]+|inf)", out)
    losses = re.findall(r"losses by ([0-9.e+-]+)", out)
    assert (len(found), len(losses)) == (ranks, 1), out[-2000:]
    assert all(compared == weights for compared, weights, _ in found), found
    worst = [max(float(value) for *_, value in found), float(losses[0])]
    weights = sum(int(compared) for compared, *_ in found)
    return {"schedule": plan.schedule.name, "stages": len(plan.stages), "weights": weights, "gradients": worst[0],
            "losses": worst[1]}  # fmt: skip


def alone(steps: int) -> list[float]:
    """Losses of one process."""
    from chains import decoder, loss, make_batch

    torch.manual_seed(0)
    model, found = decoder(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        inputs, target = make_batch(1 + step, 24)
        optimizer.zero_grad()
        value = loss(model(*inputs), target)
        value.backward()
        optimizer.step()
        found.append(float(value.detach()))
    return found


def started(command: list[str], folder: Path) -> str:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
                 "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT / "src")])}  # fmt: skip
    done = subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=400, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def write(files: dict[str, str]) -> None:
    for path, text in files.items():
        write_text(path, text)


def by_engine(target: str, plan: Plan, folder: Path, python: Path) -> dict[str, object]:
    out = str(folder / f"{target.replace('-', '_')}{TARGETS[target].ending}")
    made = export_plan(plan, target, out=out)
    write(made.files)
    start = [str(python)]
    if target == "deepspeed":
        start += ["-m", "torch.distributed.run", "--nproc-per-node", str(len(plan.ranks))]
    text = started([*start, str(HERE / "read_export.py"), target, out], folder)
    found = json.loads(text.rpartition("FOUND ")[2].splitlines()[0])
    found["lost"] = [feature.value for feature in made.losses]
    if target == "deepspeed":
        found["difference"] = max(abs(a - b) / abs(b) for a, b in zip(found["losses"], alone(3), strict=True))
        found["read"] += f"; three steps' losses differ from one process by {found['difference']:.1e}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, required=True)
    given = parser.parse_args()
    result: dict[str, object] = {"torch": torch.__version__, "bapipe": bapipe.__version__, "model": str(ModelRef(
        name="decoder", ref="chains:decoder"))}  # fmt: skip
    rows, read = [], {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for schedule in SCHEDULES:
            rows.append(by_torch(planned(schedule), folder))
            print(rows[-1], flush=True)
        plan = planned("1f1b-sno")
        for target in PACKAGES:
            read[target] = by_engine(target, plan, folder, environment(given.environments, target))
            print(target, read[target], flush=True)
    result |= {"by_torch": rows, "by_engine": read}
    write_text(HERE / "result.json", dump_json(result))
    write_text(HERE / "result.md", table(rows, read))


def table(rows: list[dict[str, object]], read: dict[str, dict[str, object]]) -> str:
    lines = [
        "# Exports read by their engines",
        "",
        f"torch {torch.__version__}, float64, three ranks, three steps:",
        "",
    ]
    lines += [
        "| order | stages | weights compared | gradients differ by | losses differ by |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['schedule']} | {r['stages']} | {r['weights']} | {r['gradients']:.1e} | {r['losses']:.1e} |"
        for r in rows
    ]
    lines += ["", "| target | version | what it made of the export | lost |", "|---|---|---|---|"]
    for name, found in read.items():
        lost = ", ".join(found["lost"]) or "nothing"  # type: ignore[arg-type]
        lines.append(f"| {name} | {found['version']} | {found['read']} | {lost} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
