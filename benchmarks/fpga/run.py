"""Table VI and how it depends on what is assumed, and how fast FPGA clusters are planned: writes result.json.

python benchmarks/fpga/run.py
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bapipe.analysis.what_if import changed
from bapipe.fpga import Parameters, Table6Row, explore_fpga, table6
from bapipe.hardware.cluster import Cluster
from bapipe.hardware.cluster_file import read_cluster
from bapipe.models.builtin import builtin_model
from bapipe.planner import Request

HERE = Path(__file__).parent
CLOCKS = (150e6, 200e6, 227e6, 250e6, 275e6, 300e6, 350e6)
LINKS = (5, 10, 25, 100, 250, 500)


def of(figure: str, value: float) -> Callable[[Cluster], Cluster]:
    return lambda cluster: changed(cluster, figure, value)


def cases() -> list[tuple[str, Parameters, Callable[[Cluster], Cluster] | None]]:
    """Label, parameters and change of the cluster; the first is the calibration itself."""
    plain = Parameters()
    rows: list[tuple[str, Parameters, Callable[[Cluster], Cluster] | None]] = [("as calibrated", plain, None)]
    rows += [(f"clock {clock / 1e6:g} MHz", plain, of("board.clock", clock)) for clock in CLOCKS if clock != 250e6]
    rows += [(f"DDR efficiency {share:g}", Parameters(ddr_efficiency=share), None) for share in (0.9, 0.8, 0.7)]
    rows += [(f"links {rate} Gb/s", plain, of("link", rate * 1e9 / 8)) for rate in LINKS if rate != 250]
    rows += [(f"usable RAM {share:g}", plain, of("board.usable_ram", share)) for share in (0.7, 1.0)]
    rows += [
        ("fluid allocation", Parameters(allocation="fluid"), None),
        ("whole layers only", Parameters(slices=1), None),
        ("parking in neighbours", Parameters(parking=True), None),
        ("gradients once per 2 images", Parameters(reuse=2), None),
    ]
    return rows


def line(row: Table6Row) -> dict[str, object]:
    return {
        "cluster": row.cluster,
        "paper": row.paper,
        "speedup": row.speedup,
        "over": {name: seconds / row.time for name, seconds in row.data_parallel.items()},
        "schedule": row.schedule,
        "microbatch": row.microbatch,
        "seconds": row.time,
        "ratio": row.ratio,
        "binds": row.binds,
    }


def planning() -> list[dict[str, object]]:
    """Seconds of a whole plan: wall and processor, the least of three; the first fills the caches."""
    found = []
    for name, spec in (
        ("resnet50", "4xvcu118"),
        ("resnet50", "2xvcu129+2xvcu118"),
        ("resnet50", "8xvcu129+8xvcu118"),
        ("resnet50", "4xvcu129+4xvcu118+4xvcu129+4xvcu118"),
        ("vgg16", "8xvcu129+8xvcu118"),
    ):
        model = builtin_model(name, granularity="conv") if name == "resnet50" else builtin_model(name)
        wall, processor = [], []
        for _ in range(3):
            begin, busy = time.perf_counter(), time.process_time()
            explore_fpga(model, read_cluster(spec), Request(global_batch=128))
            wall.append(time.perf_counter() - begin)
            processor.append(time.process_time() - busy)
        found.append(
            {
                "model": name,
                "cluster": spec,
                "wall_seconds": min(wall),
                "processor_seconds": min(processor),
                "first_processor_seconds": processor[0],
            }
        )
    return found


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for text in info.read_text(encoding="utf-8").splitlines():
            if text.startswith("model name"):
                return text.partition(":")[2].strip()
    return platform.processor()


def main() -> None:
    result = {
        "environment": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "machine": platform.machine(),
            "cpu": cpu(),
        },
        "planning": planning(),
        "table6": [],
    }
    for label, parameters, change in cases():
        rows = table6(parameters, change=change)
        result["table6"].append({"case": label, "rows": [line(row) for row in rows]})  # type: ignore[attr-defined]
        print(f"{label:28}", " ".join(f"{row.speedup:.3f} {row.schedule} {row.binds:12}" for row in rows))
        sys.stdout.flush()
    (HERE / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
