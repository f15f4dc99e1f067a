"""The same layer times and clusters for our planner and for installed peers: quality and planning time in one run.

    PYTHONPATH=src PEERS_ENVIRONMENT/bin/python benchmarks/peers/peers.py [--quick]

writes result.json and result.md beside this file. Peers know layer times alone; every partition is then timed by
our simulator under the same schedule (1F1B-SO, M = 4N) on the same links and accelerators.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from systems import ALPA_LAYERS, installed

from bapipe.costs.profile import CostTable, Profile, ProfiledLayer
from bapipe.costs.segments import Chain, make_chain
from bapipe.hardware.cluster import Accelerator, AcceleratorType, Cluster, Link
from bapipe.models.layers import ModelRef
from bapipe.planner import Request, explore
from bapipe.planner.candidate import Hardware, StageChoice
from bapipe.planner.evaluate import evaluate
from bapipe.planner.partition import baselines
from bapipe.planner.partition.exact.solve import Problem, solve
from bapipe.planner.pipelines import FAMILIES, build, optimal
from bapipe.reproduce.calibration import model_profile

HERE = Path(__file__).parent
FAMILY = FAMILIES["1f1b-so"]
FAST, SLOW = "v100-16", "half"
OURS, EXACT = "bapipe plan", "bapipe, exact partition alone"
"""the planner as it is used, and one of the ways in which it cuts"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on a cluster."""

    name: str
    chain: Chain
    hardware: Hardware

    @property
    def stages(self) -> int:
        return len(self.hardware.cluster)

    @property
    def microbatches(self) -> int:
        return 4 * self.stages

    @property
    def times(self) -> list[float]:
        """Forward plus backward of each layer on the first accelerator type: all that a peer is told."""
        values: list[float] = self.chain.work[0].tolist()
        return values


def cluster_of(types: Sequence[str], bandwidth: float) -> Cluster:
    kinds = {
        name: AcceleratorType(
            name=name, kind="gpu", flops={"fp32": 14e12}, memory=16e9, memory_bandwidth=900e9,
            execution="synchronous",
        )
        for name in dict.fromkeys(types)
    }  # fmt: skip
    members = tuple(
        Accelerator(name=f"node0/{index}", type=name, node="node0") for index, name in enumerate(types)
    )
    return Cluster(name="+".join(types), accelerators=members, types=kinds, within=Link(bandwidth=bandwidth))


def made_profile(forward: Sequence[float], boundary: Sequence[float]) -> Profile:
    """Layers of these forward times, twice as long backwards, at the one micro-batch size 1."""
    count = len(forward)
    zeros = (tuple(0.0 for _ in forward),)
    table = CostTable(
        source="hand-written",
        description="made for the benchmark",
        microbatches=(1,),
        forward=(tuple(forward),),
        backward=(tuple(2 * value for value in forward),),
        boundary_forward=(tuple(boundary),),
        boundary_backward=(tuple(boundary),),
        saved_activations=zeros,
        update=zeros[0],
    )
    return Profile(
        model=ModelRef(name=f"made-{count}"),
        dtype="fp32",
        layers=tuple(ProfiledLayer(name=f"l{i}", parameters=0, weight_bytes=0.0) for i in range(count)),
        accelerators={FAST: table},
    )


def with_slow(profile: Profile) -> Profile:
    """The profile with a second accelerator type of half the speed."""
    table = profile.accelerators[FAST]
    slow = replace(
        table,
        forward=tuple(tuple(2 * value for value in row) for row in table.forward),
        backward=tuple(tuple(2 * value for value in row) for row in table.backward),
    )
    return replace(profile, accelerators={FAST: table, SLOW: slow})


def case(name: str, profile: Profile, types: Sequence[str], *, size: int, bandwidth: float) -> Case:
    chain = make_chain(profile, tuple(dict.fromkeys(types)), size)
    return Case(name=name, chain=chain, hardware=Hardware(cluster=cluster_of(types, bandwidth)))


def cases(quick: bool) -> list[Case]:
    found = []
    for times in ([1.0, 4.0, 1.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0, 2.0]):
        profile = made_profile([value / 3 for value in times], [0.0] * len(times))
        found.append(case(f"{[int(value) for value in times]} in 3", profile, [FAST] * 3, size=1, bandwidth=12e9))
    for model, title in (("vgg16", "VGG-16"), ("resnet50", "ResNet-50"), ("gnmt-8", "GNMT-8")):
        for count in (4, 8):
            for bandwidth in (12e9, 1.6e9):
                name = f"{title}, {count} V100, {bandwidth / 1e9:g} GB/s"
                types = [FAST] * count
                found.append(case(name, model_profile(model), types, size=32, bandwidth=bandwidth))
        mixed = [FAST, FAST, SLOW, SLOW]
        found.append(
            case(f"{title}, 2 V100 + 2 of half speed, 12 GB/s", with_slow(model_profile(model)), mixed, size=32,
                 bandwidth=12e9)
        )  # fmt: skip
    generator = np.random.default_rng(0)
    for layers, count in ((32, 4), (256, 16), *(() if quick else ((512, 16), (1000, 8)))):
        forward = generator.lognormal(-7.0, 0.7, layers).tolist()
        boundary = generator.uniform(0.0, 4e6, layers).tolist()
        profile = made_profile(forward, boundary)
        found.append(
            case(f"random, {layers} layers, {count} accelerators", profile, [FAST] * count, size=1, bandwidth=12e9)
        )
    return found


def clock(work: Callable[[], tuple[int, ...]]) -> tuple[tuple[int, ...], float]:
    """Result and seconds: the median of 5 after one to warm up, or that one if it took over a second."""
    begin = time.perf_counter()
    answer = work()
    first = time.perf_counter() - begin
    if first > 1.0:
        return answer, first
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        answer = work()
        times.append(time.perf_counter() - begin)
    return answer, statistics.median(times)


def stages_of(cuts: Sequence[int], one: Case) -> list[StageChoice]:
    """Peers put stage i on accelerator i."""
    edges = [0, *cuts, len(one.chain)]
    return [
        StageChoice(first=first, last=stop - 1, accelerators=(index,))
        for index, (first, stop) in enumerate(itertools.pairwise(edges))
    ]


def bottleneck(cuts: Sequence[int], times: Sequence[float]) -> float:
    edges = [0, *cuts, len(times)]
    return max(math.fsum(times[first:stop]) for first, stop in itertools.pairwise(edges))


def least_bottleneck(one: Case) -> float:
    """The optimum for layer times alone, on alike accelerators."""
    problem = Problem.unlimited(
        forward=np.array([one.times]), backward=np.zeros((1, len(one.times))), counts=[one.stages],
        microbatches=one.microbatches, num_stages=one.stages,
    )  # fmt: skip
    return solve(problem, minimise="bottleneck").bottleneck


def planned(one: Case) -> list[StageChoice]:
    """The whole planner, held to this schedule, depth and micro-batch size; it simulates what it compares."""
    size = one.chain.microbatch
    request = Request(
        global_batch=size * one.microbatches, microbatch=size, schedule=FAMILY.schedule, stages=one.stages
    )
    return list(explore(one.chain.profile, one.hardware.cluster, request).best.candidate.stages)


def cut_exactly(one: Case) -> list[StageChoice]:
    """The exact optimum of its own objective, period plus fill, which the simulation may see otherwise."""
    return optimal(one.chain, one.hardware, FAMILY, one.microbatches, num_stages=one.stages)


def measure(one: Case, peers: dict[str, Callable[..., tuple[int, ...]]]) -> list[dict[str, object]]:
    alike = len(one.chain.types) == 1
    least = least_bottleneck(one) if alike else None
    chosen: dict[str, list[StageChoice]] = {}

    def ours(name: str, cut: Callable[[Case], list[StageChoice]]) -> tuple[int, ...]:
        chosen[name] = cut(one)
        return tuple(stage.first for stage in chosen[name][1:])

    answers = {
        OURS: clock(lambda: ours(OURS, planned)),
        EXACT: clock(lambda: ours(EXACT, cut_exactly)),
    }
    for name, cut in peers.items():
        if name == "alpa" and len(one.chain) > ALPA_LAYERS:
            continue
        with contextlib.redirect_stdout(io.StringIO()):
            answers[name] = clock(lambda cut=cut: cut(one.times, one.stages, one.microbatches))
        cuts = answers[name][0]
        edges = [0, *cuts, len(one.chain)]
        if len(cuts) == one.stages - 1 and all(a < b for a, b in itertools.pairwise(edges)):
            chosen[name] = stages_of(cuts, one)
    rows = []
    for name, (cuts, seconds) in answers.items():
        row: dict[str, object] = {"case": one.name, "system": name, "cuts": list(cuts), "seconds": seconds}
        row["bottleneck"] = None if least is None else bottleneck(cuts, one.times) / least
        if name in chosen:
            found = evaluate(build(one.chain, chosen[name], FAMILY, one.microbatches, one.hardware), one.hardware)
            row |= {"step": found.time, "fits": found.short is None}
        rows.append(row)
    base, planning = rows[0]["step"], rows[0]["seconds"]
    assert isinstance(base, float)
    assert isinstance(planning, float)
    for row in rows:
        step, seconds = row.get("step"), row["seconds"]
        row["step_ratio"] = step / base if isinstance(step, float) else None
        row["seconds_ratio"] = seconds / planning if isinstance(seconds, float) else None
    return rows


def agreement(everything: Sequence[Case], rows: Sequence[dict[str, object]]) -> dict[str, str]:
    """In how many cases `bapipe.planner.partition.baselines` cuts as the installed peer does; up to 256 layers."""
    rules = {"torchgpipe": baselines.by_time, "deepspeed": baselines.by_parameter_spread}
    cuts = {(row["case"], row["system"]): row["cuts"] for row in rows}
    small = [one for one in everything if len(one.chain) <= 256]
    found = {}
    for name, rule in rules.items():
        compared = [one for one in small if (one.name, name) in cuts]
        same = sum(list(rule(one.times, one.stages)) == cuts[one.name, name] for one in compared)
        found[name] = f"{same} of {len(compared)}"
    return found


def table(result: dict[str, object]) -> str:
    rows = result["rows"]
    versions = result["versions"]
    assert isinstance(rows, list)
    assert isinstance(versions, dict)
    agree = result["reimplementations_agree"]
    assert isinstance(agree, dict)
    lines = [
        f"Environment: {result['environment']}",
        "",
        "Versions: " + "; ".join(f"{name} {version}" for name, version in versions.items()),
        "",
        "`bapipe.planner.partition.baselines` cuts as the installed peer: "
        + "; ".join(f"{name} in {count} cases" for name, count in agree.items()),
        "",
        "| case | system | bottleneck / optimum | step / ours | planning, ms | planning / ours |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        least = "–" if row["bottleneck"] is None else f"{row['bottleneck']:.3f}"
        step = "a stage is empty" if row["step_ratio"] is None else f"{row['step_ratio']:.3f}"
        step += "" if row.get("fits", True) else " (does not fit)"
        lines.append(
            f"| {row['case']} | {row['system']} | {least} | {step} | {row['seconds'] * 1e3:.3g} | "
            f"{row['seconds_ratio']:.2g} |"
        )
    return "\n".join(lines) + "\n"


def environment() -> str:
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), cpu)
    return f"{os.cpu_count()} cores of {cpu}, Python {platform.python_version()}, numpy {np.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="without the two largest cases")
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    with contextlib.redirect_stdout(io.StringIO()):
        peers, versions = installed()
    rows: list[dict[str, object]] = []
    everything = cases(options.quick)
    for one in everything:
        found = measure(one, peers)
        rows += found
        print(one.name, {row["system"]: row["step_ratio"] for row in found}, flush=True)
    result: dict[str, object] = {
        "environment": environment(),
        "versions": versions,
        "reimplementations_agree": agreement(everything, rows),
        "rows": rows,
    }
    (options.out / "result.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (options.out / "result.md").write_text(table(result), encoding="utf-8")


if __name__ == "__main__":
    main()
