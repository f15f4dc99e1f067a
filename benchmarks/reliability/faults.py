"""The fault matrix: ranks are killed, stopped, slowed and made to fail everywhere; README.md says what must hold.

Writes result-faults.json here, or result-faults-slices.json with --slices (or --out): every fault with its
seconds, line and what did not hold. A campaign that was stopped, or whose --minutes are over, goes on with the
faults that are missing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import tempfile
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from fault_cases import EVERY, SCHEDULES, SLICES, STEPS, TIMEOUT, Fault, all_faults
from fault_run import Machine, baseline, run_fault

from bapipe import __version__
from bapipe.io.files import write_text

HERE = Path(__file__).resolve().parent


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def environment() -> dict[str, Any]:
    """Of this machine and its software."""
    import torch

    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "bapipe": __version__,
        **({"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, and the longest time from a fault to the end, by kind of fault."""
    longest: dict[str, float] = {}
    for row in rows:
        if row["seconds_after_fault"] is not None:
            longest[row["how"]] = max(longest.get(row["how"], 0.0), row["seconds_after_fault"])
    return {
        "faults": len(rows),
        "held": sum(not row["problems"] for row in rows),
        "hung": sum("hangs" in row["problems"] for row in rows),
        "by_how": dict(sorted(Counter(row["how"] for row in rows).items())),
        "by_place": dict(sorted(Counter(row["place"] for row in rows).items())),
        "by_schedule": dict(sorted(Counter(row["schedule"] for row in rows).items())),
        "by_transport": dict(sorted(Counter(row["transport"] for row in rows).items())),
        "longest_seconds_after_fault": dict(sorted(longest.items())),
    }


def read_result(path: Path) -> list[dict[str, Any]]:
    """The faults of an earlier campaign; none where there is none."""
    return list(json.loads(path.read_text(encoding="utf-8"))["rows"]) if path.exists() else []


def write_result(path: Path, rows: list[dict[str, Any]], seed: int) -> None:
    ordered = sorted(rows, key=lambda row: str(row["name"]))
    settings = {"seed": seed, "steps": STEPS, "every": EVERY, "timeout_s": TIMEOUT}
    told = {"environment": environment(), "settings": settings, **summary(rows), "rows": ordered}
    write_text(path, json.dumps(told, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="which ranks fail, and in which order the faults come")
    parser.add_argument("--limit", type=int, help="so many faults at most")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no more faults after so long")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--slices", action="store_true", help="with cuda: a slice of the GPU for each rank (MPS)")
    parser.add_argument("--transports", help="by commas; by default gloo on CPUs, nccl and ipc on slices")
    parser.add_argument("--schedules", default=",".join(SCHEDULES), help="by commas; by default all")
    parser.add_argument("--only", default="", help="faults whose name has this in it")
    parser.add_argument("--again", action="store_true", help="run faults again of which something did not hold")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    given.out = given.out or HERE / ("result-faults-slices.json" if given.slices else "result-faults.json")
    transports = (given.transports or ("gloo" if given.device == "cpu" else "nccl,ipc")).split(",")
    root = hasattr(os, "geteuid") and os.geteuid() == 0
    rows = [row for row in read_result(given.out) if not (given.again and row["problems"])]
    known = {row["name"] for row in rows}
    faults = [
        fault
        for fault in all_faults(transports, seed=given.seed)
        if fault.name not in known
        and given.only in fault.name
        and fault.schedule in given.schedules.split(",")
        and (root or not fault.on_disk)
    ][: given.limit]
    if given.slices:
        from bapipe.torch import slices

        slices.start(slices.even_slices(SLICES), memory=16e9)
    work = Path(tempfile.mkdtemp(prefix="bapipe-faults-"))
    begun = time.monotonic()
    locks: dict[tuple[str, str], threading.Lock] = defaultdict(threading.Lock)

    def one(fault: Fault) -> dict[str, Any] | None:
        machine = Machine(device=given.device, transport=fault.transport, sliced=given.slices)
        before = work / f"baseline-{fault.schedule}-{fault.transport}"
        with locks[fault.schedule, fault.transport]:
            if time.monotonic() - begun > 60 * given.minutes:
                return None
            losses = baseline(fault.schedule, before, machine)  # once, of a run without a fault
        if time.monotonic() - begun > 60 * given.minutes:
            return None
        return run_fault(fault, work / fault.name, machine, losses, before)

    try:
        with ThreadPoolExecutor(given.jobs) as pool:
            for done in as_completed([pool.submit(one, fault) for fault in faults]):
                row = done.result()
                if row is None:
                    continue
                rows.append(row)
                write_result(given.out, rows, given.seed)
                held = "holds" if not row["problems"] else "DOES NOT HOLD: " + "; ".join(row["problems"])
                print(f"{len(rows):4}  {row['seconds']:6.1f} s  {row['name']}  {held}", flush=True)
    finally:
        if given.slices:
            slices.stop()
    print(json.dumps(summary(rows)))
    broken = [row["name"] for row in rows if row["problems"]]
    if broken:
        raise SystemExit(f"did not hold: {', '.join(broken)}; what this call has seen of it is in {work}")
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
