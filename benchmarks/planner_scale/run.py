"""What the planner finds on large clusters, and what that costs: writes result.json beside this file.

python benchmarks/planner_scale/run.py                 all cases, a few minutes of one core
python benchmarks/planner_scale/run.py --case NAME     one case, as one line of JSON

Every case runs in a process of its own, so that its peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from bapipe.costs.profile import CostTable, Profile, ProfiledLayer
from bapipe.costs.resolve_model import load_profile
from bapipe.hardware.cluster import Accelerator, AcceleratorType, Cluster, Link
from bapipe.hardware.cluster_file import read_cluster
from bapipe.models.layers import ModelRef
from bapipe.planner import Request, explore, make_plan
from bapipe.records.plan import write_plan

HERE = Path(__file__).parent
MODELS = ("llama-70b", "gpt2-xl")
SIZES = (16, 64, 256, 1024, 4096)
SAMPLES = 64
"""per accelerator"""
NODE, WITHIN, BETWEEN = 8, 450e9, 50e9
SEED = 24
LAYERS = 1000
"""of the made model"""
MADE = {"made, one accelerator is enough": 80e9, "made, eight accelerators are needed": 1.2e9}
"""bytes of an accelerator's memory"""


def cluster_of(kind: AcceleratorType, count: int) -> Cluster:
    """Nodes of eight, 450 GB/s within and 50 GB/s between them."""
    names = [(f"n{index // NODE}", index % NODE) for index in range(count)]
    return Cluster(
        name=f"{count}x{kind.name}",
        accelerators=tuple(Accelerator(name=f"{node}/{at}", type=kind.name, node=node) for node, at in names),
        types={kind.name: kind},
        within=Link(bandwidth=WITHIN),
        between=Link(bandwidth=BETWEEN) if count > NODE else None,
    )


def made_profile(kind: str) -> Profile:
    """A thousand layers of random times, 4 MB of weights and 1 to 4 MB of activations each."""
    generator = np.random.default_rng(SEED)
    base = generator.uniform(1e-3, 3e-3, LAYERS)
    boundary, saved = generator.uniform(1e5, 1e6, LAYERS), generator.uniform(1e6, 4e6, LAYERS)
    sizes = (1, 2, 4, 8)

    def rows(values: np.ndarray) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(float(size * value) for value in values) for size in sizes)

    table = CostTable(
        source="hand-written",
        description="random",
        microbatches=sizes,
        forward=rows(base),
        backward=rows(2 * base),
        boundary_forward=rows(boundary),
        boundary_backward=rows(boundary),
        saved_activations=rows(saved),
        update=(1e-5,) * LAYERS,
    )
    layers = tuple(ProfiledLayer(name=f"layer{at}", parameters=10**6, weight_bytes=4e6) for at in range(LAYERS))
    return Profile(model=ModelRef(name="made"), dtype="fp32", layers=layers, accelerators={kind: table})


def cases() -> list[str]:
    return [f"{model} on {count}" for model in MODELS for count in SIZES] + [f"{name} on 1024" for name in MADE]


def run_case(name: str) -> dict[str, object]:
    """Plan one case: explore, make the plan and write it."""
    model, _, number = name.rpartition(" on ")
    count, kind = int(number), read_cluster("h100").types["h100"]
    if model in MADE:
        kind = replace(kind, memory=MADE[model])
        profile, optimizer = made_profile(kind.name), "sgd"
    else:
        sizes = [2**power for power in range(7)]
        profile = load_profile(model, types=[kind], precision="bf16", microbatches=sizes)
        optimizer = "adam"
    cluster = cluster_of(kind, count)
    wall, cpu = time.perf_counter(), time.process_time()
    found = explore(profile, cluster, Request(optimizer=optimizer, global_batch=SAMPLES * count))
    plan = make_plan(found)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        write_plan(plan, path)
        size = path.stat().st_size
    best = found.best
    used = {index for stage in best.candidate.stages for index in stage.accelerators}
    return {
        "case": name,
        "accelerators": count,
        "plan": f"{best.candidate.label}, micro-batch {best.candidate.chain.microbatch}",
        "seconds": best.time,
        "samples_per_second": best.throughput,
        "per_accelerator": best.throughput / count,
        "idle": count - len(used),
        "cpu_seconds": time.process_time() - cpu,
        "wall_seconds": time.perf_counter() - wall,
        "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "plan_bytes": size,
        "candidates": found.evaluated,
    }


def processor() -> str:
    """The name of the processor, as Linux has it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def environment() -> dict[str, object]:
    import numba

    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "seed": SEED,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", choices=cases())
    options = parser.parse_args()
    if options.case:
        print(json.dumps(run_case(options.case)))
        return
    rows = []
    for name in cases():
        done = subprocess.run(
            [sys.executable, __file__, "--case", name], capture_output=True, text=True, check=False, timeout=900
        )
        if done.returncode:
            raise SystemExit(f"{name} failed: {done.stderr[-2000:]}")
        rows.append(json.loads(done.stdout))
        row = rows[-1]
        print(
            f"{name}: {row['per_accelerator']:.4f} samples/s per accelerator, {row['cpu_seconds']:.1f} CPU s, "
            f"{row['peak_megabytes']:.0f} MB, {row['plan']}",
            flush=True,
        )
    result = {"environment": environment(), "rows": rows}
    (HERE / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
