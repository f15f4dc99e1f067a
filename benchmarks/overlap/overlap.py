"""Does the executor overlap as the simulator says, and what does an action cost? Writes result.json and result.md.

python benchmarks/overlap/overlap.py            all of it, 10 to 20 minutes, as root
python benchmarks/overlap/overlap.py --tiny     one small case each, to see that it runs
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from namespaces import Chain, chain
from tables import write_tables

from bapipe.errors import BaPipeError
from bapipe.schedule.generators import make_schedule
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.lowering import Network
from bapipe.simulator.simulate import simulate

HERE = Path(__file__).parent
RANKS = 4
RATE = "500mbit"
FORWARD, BACKWARD = 0.020, 0.040
FLOATS = {"sr-0": 64, "sr-0.5": 154_000, "sr-0.8": 245_000, "sr-1.1": 338_000}
"""floats of a message, by roughly what part of a forward its transfer takes"""
OURS = ("bapipe 1f1b-sno", "bapipe 1f1b-so", "bapipe gpipe", "bapipe zb-h1")
TORCH = (
    "torch Schedule1F1B",
    "torch ScheduleGPipe",
    "torch ScheduleInterleaved1F1B",
    "torch ScheduleLoopedBFS",
    "torch ScheduleInterleavedZeroBubble",
)
"""all that torch ships and that run with one stage per rank; ZBV and DualPipeV want two"""
PATIENCE = 1500.0
"""seconds for all ranks of a job"""


def run_job(net: Chain, job: dict[str, Any], world: int) -> list[dict[str, Any]]:
    """What every rank saw. Ends all ranks if one fails."""
    with tempfile.TemporaryDirectory(prefix="bapipe-overlap-") as folder:
        path = Path(folder) / "job.json"
        path.write_text(json.dumps({**job, "world": world, "store": f"{folder}/store"}), encoding="utf-8")
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world):
                command = [*net.enter(rank), sys.executable, str(HERE / "worker.py"), str(path), str(rank)]
                environment = {**os.environ, "GLOO_SOCKET_IFNAME": net.interface(rank), "OMP_NUM_THREADS": "1"}
                ranks.append(subprocess.Popen(command, env=environment))
            _await(ranks)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return [json.loads((Path(folder) / f"job-{rank}.json").read_text("utf-8")) for rank in range(world)]


def _await(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    end = time.monotonic() + PATIENCE
    while any(process.poll() is None for process in ranks):
        failed = [rank for rank, process in enumerate(ranks) if process.poll()]
        if failed:
            raise BaPipeError(f"rank {failed[0]} ended with {ranks[failed[0]].returncode}; see what it printed")
        if time.monotonic() > end:
            raise BaPipeError(f"the ranks were not done within {PATIENCE:g} s; the machine is too busy")
        time.sleep(0.2)


def step_seconds(seen: Sequence[dict[str, Any]], name: str) -> list[float]:
    """Of each repetition, from the common start to the end of the last rank."""
    by_rank = [rank["samples"][name] for rank in seen]
    return [max(rank[1] for rank in same) - same[0][0] for same in zip(*by_rank, strict=True)]


def others_share(seen: Sequence[dict[str, Any]]) -> float:
    """What other processes, or the host, took of this machine's CPU time while a system was timed."""
    taken = had = 0.0
    for name in seen[0]["samples"]:
        for same in zip(*(rank["samples"][name] for rank in seen), strict=True):
            taken += same[0][4] - sum(rank[3] for rank in same)
            had += (same[0][1] - same[0][0]) * len(os.sched_getaffinity(0))
    return max(0.0, taken / had)


def check_gradients(seen: Sequence[dict[str, Any]], case: str, systems: Sequence[str]) -> None:
    """All systems must have trained the same."""
    for rank in seen:
        gradients = {system: rank["gradients"][f"{case}/{system}"] for system in systems if system != "alone"}
        reference, *others = gradients.items()
        for name, found in others:
            pairs = zip(found, reference[1], strict=True)
            assert all(abs(a - b) <= 1e-4 * (abs(b) + 1e-3) for a, b in pairs), f"{name} is not {reference[0]}"


def predicted(system: str, case: dict[str, Any], transfer: Sequence[float]) -> float | None:
    """The simulated mini-batch; torch's 1F1B, which waits for every exchange, as a blocking one."""
    owner, _, name = system.partition(" ")
    network = Network()
    if owner == "torch":
        if name != "Schedule1F1B":
            return None
        name, network = "1f1b-sno", Network(sending="blocking")
    costs = Costs.of(RANKS, forward=case["forward"], backward=case["backward"], transfer=transfer)
    return simulate(make_schedule(name, RANKS, case["microbatches"]), costs, network).time


def measure_overlap(net: Chain, floats: dict[str, int], *, microbatches: int, repeats: int) -> dict[str, Any]:
    """Every system at every message size, and what the simulator makes of the links as they were measured."""
    cases = {
        name: {"floats": count, "forward": FORWARD, "backward": BACKWARD, "microbatches": microbatches}
        for name, count in floats.items()
    }
    systems = [*OURS, *TORCH]
    job = {
        "link_bytes": [4 * count for count in floats.values()],
        "link_repeats": 40,
        "cases": cases,
        "systems": dict.fromkeys(cases, systems),
        "warmup": 1,
        "repeats": repeats,
    }
    net.shape(RATE)
    seen = run_job(net, job, RANKS)
    rows = []
    for index, (name, case) in enumerate(cases.items()):
        check_gradients(seen, name, systems)
        links = [statistics.median(rank["links"][index]) for rank in seen[:-1]]
        found = {}
        for system in systems:
            times = step_seconds(seen, f"{name}/{system}")
            simulated = predicted(system, case, links)
            median = statistics.median(times)
            found[system] = {
                "median": median,
                "samples": times,
                "simulated": simulated,
                "error": None if simulated is None else median / simulated - 1,
            }
        rows.append(
            {
                "case": name,
                "bytes": 4 * case["floats"],
                "transfer": statistics.fmean(links),
                "links": links,
                "link_samples": [rank["links"][index] for rank in seen[:-1]],
                "systems": found,
            }
        )
    return {"repeats": repeats, "others": others_share(seen), "cases": rows}


def measure_overhead(net: Chain, *, world: int, microbatches: int, repeats: int) -> dict[str, Any]:
    """Host time per action where there is next to nothing to compute or to send."""
    case = {"floats": 16, "forward": 0.0, "backward": 0.0, "microbatches": microbatches}
    # The order that torch's interleaved 1F1B has with one stage per rank.
    lean = "bapipe 1f1b " + ",".join(str(cap) for cap in range(2 * world - 1, 0, -2))
    systems = [*OURS, lean, *TORCH, "alone"]
    job = {
        "link_bytes": [],
        "link_repeats": 0,
        "cases": {"tiny": case},
        "systems": {"tiny": systems},
        "warmup": 3,
        "repeats": repeats,
    }
    net.shape(None)
    seen = run_job(net, job, world)
    check_gradients(seen, "tiny", systems)
    actions = 2 * microbatches
    found = {}
    for system in systems:
        name = f"tiny/{system}"
        cpu = [
            [statistics.fmean(rank[number] for rank in same) for number in (2, 3)]
            for same in zip(*(rank["samples"][name] for rank in seen), strict=True)
        ]
        found[system] = {
            "wall": statistics.median(step_seconds(seen, name)) / actions,
            "thread": statistics.median(both[0] for both in cpu) / actions,
            "process": statistics.median(both[1] for both in cpu) / actions,
        }
    return {
        "ranks": world,
        "microbatches": microbatches,
        "repeats": repeats,
        "others": others_share(seen),
        "systems": found,
    }


def environment() -> dict[str, Any]:
    from importlib.metadata import version

    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "kernel": platform.release(),
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
    }


def _terminated(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="measure overlap and overhead of the executor")
    parser.add_argument("--tiny", action="store_true", help="one small case each, to see that it runs")
    parser.add_argument(
        "--repeats",
        type=int,
        default=7,
        help="of every system and message size; the overhead has five times as many",
    )
    parser.add_argument("--out", type=Path, default=HERE, help="folder of result.json and result.md")
    options = parser.parse_args(argv)
    # A polite kill must clean up as Ctrl-C does.
    signal.signal(signal.SIGTERM, _terminated)
    try:
        with chain(RANKS) as net:
            if options.tiny:
                sizes = {"sr-0.5": FLOATS["sr-0.5"]}
                overlap = measure_overlap(net, sizes, microbatches=RANKS, repeats=1)
                overhead = [measure_overhead(net, world=2, microbatches=4, repeats=2)]
            else:
                overlap = measure_overlap(net, FLOATS, microbatches=16, repeats=options.repeats)
                overhead = [
                    measure_overhead(net, world=world, microbatches=64, repeats=5 * options.repeats)
                    for world in (2, RANKS)
                ]
    except BaPipeError as error:
        print(f"overlap.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("overlap.py: interrupted; nothing was written", file=sys.stderr)
        return 130
    result = {
        "environment": environment(),
        "settings": {
            "ranks": RANKS,
            "rate": RATE,
            "forward": FORWARD,
            "backward": BACKWARD,
            "microbatches": RANKS if options.tiny else 16,
        },
        "overlap": overlap,
        "overhead": overhead,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    text = write_tables(result)
    (options.out / "result.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
