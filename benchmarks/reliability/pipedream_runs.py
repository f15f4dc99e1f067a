"""A small VGG-16 trained by PipeDream again and again, several runs at once: none may crash.

    python benchmarks/reliability/pipedream_runs.py --device cuda --times 200 --jobs 6     on a GPU; goes on
    python benchmarks/reliability/pipedream_runs.py --times 4                              on CPU ranks

Of 23 such runs on one GPU without slices one ended with a segmentation fault in a rank's second forward. Each run
is a `bapipe run` of three steps. Writes how many ended, and of every one that failed its exit code and last lines;
ends with code 1 where one did.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from faults import environment

from bapipe.costs.profile import Profile
from bapipe.hardware.cluster import Accelerator, AcceleratorType, Cluster, Link
from bapipe.io.files import write_text
from bapipe.planner import Request, explore, make_plan
from bapipe.records.plan import Plan, write_plan
from bapipe.torch.profiler import MeasureSettings, profile_model

HERE = Path(__file__).resolve().parent
ARGUMENTS: dict[str, int | float | str | bool] = {
    "image": 32,
    "width": 8,
    "hidden": 64,
    "classes": 10,
    "with_loss": True,
}
STEPS, SIZE, BATCH = 3, 4, 16
LONGEST = 180.0
"""seconds of a run, after which it counts as one that hangs"""


def planned(device: str, folder: Path) -> Plan:
    """Two stages by PipeDream, on two ranks that share the device."""
    settings = MeasureSettings(microbatches=(SIZE,), folder=folder, seconds=0.01)
    profile: Profile = profile_model(
        "vgg16", settings=settings, device=device, precision="fp32", args=ARGUMENTS
    ).profile
    (kind,) = profile.accelerators
    members = tuple(Accelerator(name=f"localhost/{rank}", type=kind, node="localhost") for rank in range(2))
    about = AcceleratorType(
        name=kind,
        kind="gpu" if device == "cuda" else "cpu",
        flops={"fp32": 1e13},
        memory=8e9,
        memory_bandwidth=1e12,
        execution="synchronous",
    )
    cluster = Cluster(
        name="two of one", accelerators=members, types={kind: about}, within=Link(bandwidth=1e10, latency=1e-5)
    )
    asked = Request(global_batch=BATCH, microbatch=SIZE, schedule="pipedream", stages=2)
    return make_plan(explore(profile, cluster, asked))


def run_once(plan: Path, device: str) -> dict[str, Any] | None:
    """None where it ended well; else its exit code and what it said last."""
    command = [sys.executable, "-m", "bapipe", "run", str(plan), "--steps", str(STEPS), "--device", device]
    try:
        done = subprocess.run(
            [*command, "--no-trace", "--timeout", "60"],
            capture_output=True,
            text=True,
            timeout=LONGEST,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"exit": None, "said": f"hangs: not done within {LONGEST:.0f} s"}
    return None if done.returncode == 0 else {"exit": done.returncode, "said": done.stderr[-3000:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no more after so long")
    parser.add_argument("--out", type=Path, default=HERE / "result-pipedream.json")
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    known = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {"runs": 0, "failed": []}
    runs, failed = int(known["runs"]), list(known["failed"])

    def one(plan: Path) -> tuple[bool, dict[str, Any] | None]:
        return (True, run_once(plan, given.device)) if time.monotonic() < end - 15 else (False, None)

    with tempfile.TemporaryDirectory(prefix="bapipe-pipedream-") as name, ThreadPoolExecutor(given.jobs) as pool:
        plan = Path(name) / "plan.json"
        write_plan(planned(given.device, Path(name)), plan)
        for done in as_completed([pool.submit(one, plan) for _ in range(given.times - runs)]):
            began, problem = done.result()
            runs += began
            failed += [] if problem is None else [problem]
            told = {"environment": environment(), "device": given.device, "jobs": given.jobs, "steps": STEPS}
            write_text(given.out, json.dumps({**told, "runs": runs, "failed": failed}, indent=1) + "\n")
    print(f"{runs} of {given.times} runs, {len(failed)} failed")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
