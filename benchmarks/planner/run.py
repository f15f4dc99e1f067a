"""How fast the planner is, and how good the paper's heuristic: writes result.json beside this file.

python benchmarks/planner/run.py            all of it, a few minutes
python benchmarks/planner/run.py --quick    without L = 10 000 and the slow baseline at L = 512
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bapipe.costs.profile import CostTable, Profile, ProfiledLayer
from bapipe.costs.resolve_model import load_profile
from bapipe.errors import InfeasibleError
from bapipe.hardware.cluster import Accelerator, AcceleratorType, Cluster, Link
from bapipe.hardware.cluster_file import read_cluster
from bapipe.models.builtin import BUILTIN_NAMES
from bapipe.models.layers import ModelRef
from bapipe.planner import Request, explore
from bapipe.planner.partition import baselines
from bapipe.planner.partition.exact.solve import Problem, solve

HERE = Path(__file__).parent


def clock(work: Callable[[], object], repeat: int = 3) -> float:
    """Median seconds of a few runs, after one to warm up."""
    work()
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def problem(layers: int, counts: list[int], *, seed: int = 0) -> Problem:
    """Random layers with communication, and memory that binds the first stages."""
    generator = np.random.default_rng(seed)
    base = generator.uniform(1.0, 3.0, layers)
    speed = 1.0 + np.arange(len(counts))
    forward = base / speed[:, None]
    saved_activations = generator.uniform(1e6, 2e6, layers)
    total = sum(counts)
    return Problem.unlimited(
        forward=forward,
        backward=2 * forward,
        counts=counts,
        microbatches=4 * total,
        send_forward=generator.uniform(0.0, 10.0, layers - 1),
        send_backward=generator.uniform(0.0, 10.0, layers - 1),
        saved_bytes=saved_activations,
        capacity=[float(saved_activations.sum()) * 1.3] * len(counts),
        weights_bytes=generator.uniform(1e5, 1e6, layers),
    )


def partition_times(quick: bool) -> list[dict[str, object]]:
    cases = [(250, [16]), (500, [32]), (1000, [64]), (2000, [128])]
    mixed = [(250, [6, 5, 5]), (500, [11, 11, 10]), (1000, [22, 21, 21])]
    large = [] if quick else [(10_000, [512]), (10_000, [256, 256])]
    rows = []
    for layers, counts in [*cases, *mixed, *large]:
        case = problem(layers, counts)
        begin = time.perf_counter()
        found = solve(case)
        first = time.perf_counter() - begin
        seconds = first if layers >= 10_000 else clock(lambda case=case: solve(case))
        rows.append({"layers": layers, "accelerators": counts, "seconds": seconds, "exact": found.exact})
        print(f"partition L={layers} N={counts}: {seconds:.4f} s, exact={found.exact}", flush=True)
    return rows


def random_profile(layers: int, types: list[str]) -> Profile:
    generator = np.random.default_rng(1)
    base = generator.uniform(1e-3, 3e-3, layers)
    boundary = generator.uniform(1e5, 1e6, layers)
    saved_activations = generator.uniform(1e6, 4e6, layers)
    sizes = (1, 2, 4, 8)

    def rows(values: np.ndarray) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(float(size * value) for value in values) for size in sizes)

    return Profile(
        model=ModelRef(name=f"random-{layers}"),
        dtype="fp32",
        layers=tuple(
            ProfiledLayer(name=f"layer{index}", parameters=10**6, weight_bytes=4e6) for index in range(layers)
        ),
        accelerators={
            name: CostTable(
                source="hand-written",
                description="random",
                microbatches=sizes,
                forward=rows(base / (1 + index)),
                backward=rows(2 * base / (1 + index)),
                boundary_forward=rows(boundary),
                boundary_backward=rows(boundary),
                saved_activations=rows(saved_activations),
                update=(1e-5,) * layers,
            )
            for index, name in enumerate(types)
        },
    )


def cluster(counts: dict[str, int]) -> Cluster:
    names = [name for name, count in counts.items() for _ in range(count)]
    return Cluster(
        name="made",
        accelerators=tuple(
            Accelerator(name=f"node/{index}", type=name, node="node") for index, name in enumerate(names)
        ),
        types={
            name: AcceleratorType(
                name=name,
                kind="gpu",
                flops={"fp32": 1e13},
                memory=16e9,
                memory_bandwidth=9e11,
                execution="synchronous",
            )
            for name in counts
        },
        within=Link(bandwidth=1e10, latency=1e-5),
    )


def search_times() -> list[dict[str, object]]:
    rows = []
    for layers, counts in ((1000, {"a": 64}), (1000, {"a": 22, "b": 21, "c": 21})):
        profile, machines = random_profile(layers, list(counts)), cluster(counts)
        begin = time.perf_counter()
        found = explore(profile, machines, Request(global_batch=1024))
        seconds = time.perf_counter() - begin
        rows.append({"layers": layers, "accelerators": counts, "seconds": seconds, "candidates": found.evaluated})
        print(f"joint search L={layers} N={counts}: {seconds:.2f} s, {found.evaluated} candidates", flush=True)
    return rows


def baseline_times(quick: bool) -> list[dict[str, object]]:
    rows = []
    for layers in (128, 256) if quick else (128, 256, 512):
        generator = np.random.default_rng(2)
        times, sizes = generator.uniform(1, 3, layers), generator.uniform(0, 10, layers)
        for replicate in (False, True):
            case = Problem.unlimited(
                forward=times / 3,
                backward=2 * times / 3,
                counts=[16],
                microbatches=64,
                send_forward=sizes[:-1],
                send_backward=sizes[:-1],
                duplex_half=True,
                max_replicas=16 if replicate else 1,
                reduce_rate=[0.0] * 17,
                num_stages=None if replicate else 16,
            )
            ours = clock(lambda case=case: solve(case, minimise="bottleneck"))
            begin = time.perf_counter()
            baselines.pipedream(
                times.tolist(),
                transfer=sizes[:-1].tolist(),
                synchronise=[0.0] * layers,
                machines=16,
                unreplicated=not replicate,
            )
            theirs = time.perf_counter() - begin
            rows.append(
                {
                    "layers": layers,
                    "replicated": replicate,
                    "bapipe": ours,
                    "pipedream": theirs,
                    "ratio": theirs / ours,
                }
            )
            print(
                f"against PipeDream's L={layers} replicated={replicate}: {ours:.4f} s, {theirs:.2f} s", flush=True
            )
    return rows


def heuristic_gaps() -> dict[str, object]:
    """The paper's strategy over the exact one: random cases, and built-in models on 4 V100s with split layers."""
    gaps = []
    for seed in range(200):
        generator = np.random.default_rng(seed)
        layers, count = int(generator.integers(8, 25)), int(generator.integers(2, 7))
        times = generator.uniform(0.2, 3.0, layers)
        profile = random_profile(layers, ["a"])
        table = profile.accelerators["a"]
        rows = tuple(tuple(float(size * value / 3) for value in times) for size in table.microbatches)
        changed = CostTable(
            source="hand-written",
            description="random",
            microbatches=table.microbatches,
            forward=rows,
            backward=tuple(tuple(2 * value for value in row) for row in rows),
            boundary_forward=tuple(tuple(value * 1000 for value in row) for row in table.boundary_forward),
            boundary_backward=tuple(tuple(value * 1000 for value in row) for row in table.boundary_backward),
            saved_activations=table.saved_activations,
            update=table.update,
        )
        case = Profile(model=profile.model, dtype="fp32", layers=profile.layers, accelerators={"a": changed})
        both = [
            explore(
                case, cluster({"a": count}), Request(global_batch=8 * count, strategy=strategy, stages=count)
            ).best.time
            for strategy in ("exact", "bapipe")
        ]
        gaps.append(both[1] / both[0] - 1)
    builtin = {}
    machines = read_cluster("4xv100")
    types = [machines.types["v100-16"]]
    for name in BUILTIN_NAMES:
        label = name.replace("-L", "-8") if name.endswith("-L") else name
        try:
            profile = load_profile(label, types=types, microbatches=[2**power for power in range(8)])
            both = [
                explore(profile, machines, Request(strategy=strategy, stages=4, split_layers=True)).best.time
                for strategy in ("exact", "bapipe")
            ]
            builtin[label] = both[1] / both[0] - 1
        except InfeasibleError:
            builtin[label] = None
    summary = {
        "random_cases": len(gaps),
        "random_mean": statistics.mean(gaps),
        "random_median": statistics.median(gaps),
        "random_max": max(gaps),
        "random_equal": sum(gap < 1e-9 for gap in gaps),
        "builtin": builtin,
    }
    print(json.dumps(summary, indent=1), flush=True)
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    solve(problem(50, [4]), engine="numba")
    result = {
        "environment": {
            "python": sys.version.split()[0],
            "numpy": np.__version__,
            "machine": platform.machine(),
            "cpu": next(
                (
                    line.split(":")[1].strip()
                    for line in Path("/proc/cpuinfo").read_text().splitlines()
                    if "model name" in line
                ),
                "unknown",
            ),
        },
        "partition": partition_times(options.quick),
        "search": search_times(),
        "pipedream": baseline_times(options.quick),
        "heuristic_gap": heuristic_gaps(),
    }
    (HERE / "result.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
