"""How long a simulation takes; README.md here says what is claimed. Writes result.json beside itself."""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from bapipe.io.files import write_text
from bapipe.schedule.actions import Schedule
from bapipe.schedule.generators import make_schedule
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.engine import Engine, time_tasks
from bapipe.simulator.lowering import Network, lower
from bapipe.simulator.simulate import simulate
from bapipe.simulator.timeline import Timeline

STAGES, MICROBATCHES = 64, (128, 256, 512, 1024)
COSTS = Costs.of(STAGES, forward=10, backward=20, transfer=5)
COMMAND = ["simulate", "1f1b-so", "-n", "4", "-m", "16", "--forward", "10", "--backward", "20", "--transfer", "5"]


def milliseconds(
    action: Callable[[], object], *, prepare: Callable[[], object] = int, runs: int = 50
) -> dict[str, float]:
    """Median and best of several runs; `prepare` is not counted."""
    gc.collect()
    taken = []
    for _ in range(runs):
        prepare()
        begin = time.perf_counter()
        action()
        taken.append((time.perf_counter() - begin) * 1e3)
    return {"median": round(statistics.median(taken), 2), "best": round(min(taken), 2)}


def same(first: Timeline, second: Timeline) -> bool:
    """Bit for bit."""
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for one, other, names in (
            (first, second, ("start", "end")),
            (first.transfers, second.transfers, ("start", "arrival")),
        )
        for name in names
    )


def measure(microbatches: int) -> dict[str, Any]:
    schedule = make_schedule("1f1b-so", STAGES, microbatches)
    fresh: list[Schedule] = []

    def make() -> None:
        fresh[:] = [make_schedule("1f1b-so", STAGES, microbatches)]

    def run(made: Schedule, engine: Engine) -> Timeline:
        return simulate(made, COSTS, engine=engine)

    lowered, free = lower(schedule, Network()), np.zeros(2 * (STAGES - 1))
    ones = np.ones(schedule.num_actions)

    def kernel() -> None:
        time_tasks(lowered.graph, duration=ones, occupy=free, latency=free, engine="numba")

    compiled, plain = run(schedule, "numba"), run(schedule, "python")
    assert same(compiled, plain), "numba and plain Python differ"
    return {
        "actions": schedule.num_actions,
        "transfers": len(compiled.transfers),
        "simulated_time": compiled.time,
        "simulate_ms": milliseconds(lambda: run(schedule, "numba")),
        "simulate_new_schedule_ms": milliseconds(lambda: run(fresh[0], "numba"), prepare=make),
        "kernel_ms": milliseconds(kernel),
        "lowering_ms": milliseconds(lambda: lower(fresh[0], Network()), prepare=make),
        "simulate_pure_python_ms": milliseconds(lambda: run(schedule, "python"), runs=7),
        "identical": True,
    }


def start_up(runs: int = 10) -> dict[str, float]:
    """Wall time of the whole command."""
    program = str(Path(sys.executable).with_name("bapipe"))

    def command() -> None:
        subprocess.run([program, *COMMAND], check=True, capture_output=True)

    command()
    return {name: round(value / 1e3, 3) for name, value in milliseconds(command, runs=runs).items()}


def environment() -> dict[str, object]:
    cpu = platform.processor()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("bapipe", "numpy", "numba", "llvmlite")},
    }


def main() -> None:
    points = []
    for microbatches in MICROBATCHES:
        points.append({"stages": STAGES, "microbatches": microbatches, **measure(microbatches)})
        print(points[-1], flush=True)
    result = {"environment": environment(), "points": points, "start_up_s": start_up()}
    write_text(Path(__file__).with_name("result.json"), json.dumps(result, indent=1) + "\n")
    print(table(result))


def table(result: dict[str, Any]) -> str:
    """The medians as README.md shows them."""
    columns = ["simulate", "new schedule", "kernel", "lowering", "pure Python"]
    keys = ["simulate_ms", "simulate_new_schedule_ms", "kernel_ms", "lowering_ms", "simulate_pure_python_ms"]
    lines = ["| " + " | ".join(["micro-batches", "actions + transfers", *columns, "simulate, per item"]) + " |"]
    lines.append("|---" * (len(columns) + 3) + "|")
    for point in result["points"]:
        count = point["actions"] + point["transfers"]
        cells = [f"{point[key]['median']:.3g} ms" for key in keys]
        each = f"{point['simulate_ms']['median'] * 1e6 / count:.0f} ns"
        lines.append("| " + " | ".join([str(point["microbatches"]), f"{count:,}", *cells, each]) + " |")
    return "\n".join([*lines, "", f"Start-up of `bapipe simulate`: {result['start_up_s']['median']} s."])


if __name__ == "__main__":
    main()
