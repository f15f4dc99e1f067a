"""Plans for 64 to 4096 accelerators with real topologies: writes result.json beside this file.

python benchmarks/scale/run.py                      all cases that result.json does not have yet
python benchmarks/scale/run.py --case NAME          one case, as one line of JSON
python benchmarks/scale/run.py --effort 3600        what an hour's search gains at 64 accelerators
python benchmarks/scale/run.py --again              all cases anew

Every case runs in a process of its own, so that its peak memory is its own. The costs are computed (`bapipe plan`
without a profile), so everything here is predicted; benchmarks/overlap measures
the small end.
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
from typing import Any

import numpy as np
from topologies import TOPOLOGIES, Topology, cluster_text

from bapipe.costs.resolve_model import load_profile
from bapipe.errors import InfeasibleError
from bapipe.hardware.cluster import AcceleratorType, Cluster
from bapipe.hardware.cluster_file import read_cluster
from bapipe.planner import Request, explore, make_plan
from bapipe.planner.evaluate import Evaluation

HERE = Path(__file__).parent
RESULT = HERE / "result.json"
SIZES = (64, 256, 1024, 4096)
MODELS = {"internet": "gpt2-xl"}
"""llama-70b elsewhere"""
GLOBAL_BATCH = {"llama-70b": 4096, "gpt2-xl": 16384}
"""samples, the same for every number of accelerators: 8 and 16 million tokens"""
TWICE = ("compute", "memory", "links within", "links between", "global batch")
BOTTLENECKS_AT = (1024,)


def cases() -> list[str]:
    return [f"{name}, {count}" for name in TOPOLOGIES for count in SIZES]


def _cluster(topology: Topology, count: int, name: str) -> Cluster:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        path.write_text(cluster_text(topology, count, name=name), encoding="utf-8")
        return read_cluster(str(path))


def _faster(kind: AcceleratorType) -> AcceleratorType:
    efficiency = replace(kind.efficiency, launch=kind.efficiency.launch / 2)
    flops = {dtype: 2 * rate for dtype, rate in kind.flops.items()}
    return replace(kind, flops=flops, memory_bandwidth=2 * kind.memory_bandwidth, efficiency=efficiency)


def _changed(topology: Topology, resource_name: str) -> Topology:
    if resource_name == "links within":
        return replace(topology, within=2 * topology.within)
    if resource_name == "links between":
        return replace(
            topology,
            between=2 * topology.between,
            machine=None if topology.machine is None else 2 * topology.machine,
            pod=None if topology.pod is None else (topology.pod[0], 2 * topology.pod[1]),
        )
    return topology


def planned(name: str, *, twice: str | None = None, effort: str | float = "normal") -> tuple[Evaluation, int]:
    """The best plan of a case, and how many were compared; `twice` names what there is twice of."""
    kind, _, number = name.rpartition(", ")
    model = MODELS.get(kind, "llama-70b")
    topology = _changed(TOPOLOGIES[kind], twice or "")
    cluster = _cluster(topology, int(number), name)
    if twice in ("compute", "memory"):
        types = {
            key: _faster(item) if twice == "compute" else replace(item, memory=2 * item.memory)
            for key, item in cluster.types.items()
        }
        cluster = replace(cluster, types=types)
    samples = GLOBAL_BATCH[model] * (2 if twice == "global batch" else 1)
    profile = load_profile(
        model, types=list(cluster.types.values()), precision="bf16", microbatches=[1, 2, 4, 8, 16]
    )
    found = explore(profile, cluster, Request(optimizer="adam", global_batch=samples, effort=effort))
    make_plan(found)
    return found.best, found.evaluated


def run_case(name: str, *, effort: str | float = "normal") -> dict[str, Any]:
    """Plan one case; at some sizes also ask what twice as much of a resource would save."""
    count = int(name.rpartition(", ")[2])
    wall, cpu = time.perf_counter(), time.process_time()
    best, evaluated = planned(name, effort=effort)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    used = {index for stage in best.candidate.stages for index in stage.accelerators}
    waits = best.timeline.exposed_communication()
    row: dict[str, Any] = {
        "case": name,
        "accelerators": count,
        "effort": effort,
        "plan": f"{best.candidate.label}, micro-batch {best.candidate.chain.microbatch}",
        "seconds": best.time,
        "samples_per_second": best.throughput,
        "bubble": best.timeline.bubble,
        "waits_for_messages": sum(waits) / (best.timeline.num_ranks * best.timeline.time),
        "idle": count - len(used),
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "peak_megabytes": memory / 1024,
        "candidates": evaluated,
    }
    if count in BOTTLENECKS_AT and effort == "normal":
        row["saved_by_twice"] = {}
        for what in TWICE:
            try:
                other, _ = planned(name, twice=what)
            except InfeasibleError:
                continue
            row["saved_by_twice"][what] = 1 - best.throughput / other.throughput
    return row


def environment() -> dict[str, object]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else "unknown",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def _case_in_a_process(name: str, *more: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--case", name, *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed: {done.stderr[-2000:]}")
    row: dict[str, Any] = json.loads(done.stdout)
    return row


def _write(result: dict[str, Any]) -> None:
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--case", choices=cases())
    parser.add_argument("--effort", type=float, help="seconds of search, at 64 accelerators")
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(run_case(options.case, effort=options.effort or "normal")))
        return
    result: dict[str, Any] = {"rows": [], "efforts": []}
    if RESULT.exists() and not options.again:
        result = json.loads(RESULT.read_text(encoding="utf-8"))
    result["environment"] = environment()
    result["global_batch"] = GLOBAL_BATCH
    if options.effort:
        names = [name for name in cases() if name.endswith(", 64")]
        there = {(row["case"], row["effort"]) for row in result["efforts"]}
        for name in names:
            if (name, options.effort) not in there:
                result["efforts"].append(_case_in_a_process(name, "--effort", str(options.effort)))
                print(name, result["efforts"][-1]["samples_per_second"], flush=True)
                _write(result)
        return
    for name in cases():
        if name not in {row["case"] for row in result["rows"]}:
            row = _case_in_a_process(name)
            result["rows"].append(row)
            print(f"{name}: {row['samples_per_second']:.2f} samples/s, {row['wall_seconds']:.0f} s", flush=True)
            _write(result)


if __name__ == "__main__":
    main()
