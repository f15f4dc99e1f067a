"""What the executor's features cost against not having them; README.md here says how it is measured.

    python benchmarks/executor/features.py --out DIR [--seconds 20] [--tiny]

Two ranks of one thread each, side by side. Writes DIR/result.json and DIR/result.md.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bapipe.costs.roofline import analytic_profile
from bapipe.hardware.cluster import Accelerator
from bapipe.hardware.cluster_file import read_cluster
from bapipe.io.files import dump_json, write_text
from bapipe.planner import Request, explore, make_plan
from bapipe.torch.capturing import Captured, capture
from bapipe.torch.pipedream.weight_versions import WeightVersions
from bapipe.torch.profiler.environment import environment_of
from bapipe.torch.profiler.statistics import SampleSummary, summarise
from bapipe.torch.runtime.pipeline import Pipeline
from bapipe.torch.stage.runner import StageRunner
from bapipe.torch.zoo.common import classes_loss
from bapipe.torch.zoo.gpt import build_gpt
from bapipe.torch.zoo.gpt import make_batch as gpt_batch
from bapipe.torch.zoo.vgg import build_vgg16
from bapipe.units import format_bytes, format_seconds

ROOT = Path(__file__).resolve().parents[2]
Work = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=20.0, help="on one comparison")
    parser.add_argument("--tiny", action="store_true", help="small models, to see that it runs")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank_main(options)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    found = _start(options)
    write_text(options.out / "result.json", dump_json(found))
    text = table(found)
    write_text(options.out / "result.md", text)
    print(text)


def _start(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--out", folder, "--seconds", str(options.seconds)]
        command += ["--rendezvous", f"file://{folder}/rendezvous", *(["--tiny"] if options.tiny else [])]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        ranks = [subprocess.Popen([*command, "--rank", str(rank)], env=environment) for rank in range(2)]
        try:
            codes = [rank.wait(timeout=120 + 20 * options.seconds) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        if codes != [0, 0]:
            raise SystemExit(f"the ranks ended with {codes}")
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
        return found


def rank_main(options: argparse.Namespace) -> None:
    """One of the two ranks, which do the same at the same time; the first writes what it found."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=options.rendezvous,
        rank=options.rank,
        world_size=2,
        timeout=datetime.timedelta(seconds=300),
    )
    stages = {"gpt": _gpt(options.tiny), "vgg": _vgg(options.tiny)}
    comparisons = []
    for name, (captured, first, last) in stages.items():
        comparisons.append(_split_backward(name, captured, first, last, options.seconds))
        comparisons.append(_stashing(name, captured, first, last, options.seconds))
    comparisons.append(_replicas(options))
    if options.rank == 0:
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        environment = {**asdict(environment_of(torch.device("cpu"))), "ranks": 2, "load_average": load}
        found = {"environment": environment, "comparisons": comparisons}
        write_text(options.out / "found.json", dump_json(found))
    dist.destroy_process_group()


def _gpt(tiny: bool) -> tuple[Captured, int, int]:
    """Two blocks out of a GPT."""
    width, sequence = (32, 8) if tiny else (256, 64)
    module, args, kwargs = build_gpt(
        blocks=3, width=width, heads=4, vocabulary=100, sequence=sequence, tied=False, dropout=0.0, batch=4
    )
    captured = capture(module, args, kwargs, check=False)
    names = [layer.name for layer in captured.layers]
    own = [index for index, name in enumerate(names) if name.startswith(("blocks.0", "blocks.1"))]
    return captured, own[0], own[-1]


def _vgg(tiny: bool) -> tuple[Captured, int, int]:
    """The last convolutions and the first fully connected layer of a VGG, where most of its weights are."""
    module, args, kwargs = build_vgg16(
        image=32, width=4 if tiny else 32, hidden=32 if tiny else 1024, classes=10, dropout=0.0, batch=4
    )
    captured = capture(module, args, kwargs, check=False)
    names = [layer.name for layer in captured.layers]
    convolutions = [index for index, name in enumerate(names) if name.startswith("features")]
    return captured, convolutions[-3], convolutions[-1] + 1


class _Bench:
    """A stage with its input and errors, as a rank that is neither first nor last has it."""

    def __init__(self, captured: Captured, first: int, last: int) -> None:
        own = replace(captured, module=copy.deepcopy(captured.module))
        self.stage = own.stage(first, last)
        self.size = own.batch
        spec, generator = self.stage.stage_spec, torch.Generator().manual_seed(0)
        self._received = [torch.randn(value.shape(self.size), generator=generator) for value in spec.received]
        self._errors = [
            torch.randn(value.shape(self.size), generator=generator) for value in spec.sent if value.requires_grad
        ]
        self.optimizer = torch.optim.SGD(self.stage.parameters(), lr=1e-6, momentum=0.9)

    def runner(self, *, parted: bool = False) -> StageRunner:
        return StageRunner(0, {self.size: self.stage}, sizes=(self.size,), parted=parted)

    def forward(self, runner: StageRunner, weights: Mapping[str, Tensor] | None = None) -> None:
        runner.begin(0, (), (), weights=weights)
        runner.forward(0, tuple(value.clone() for value in self._received))

    @property
    def errors(self) -> tuple[Tensor, ...]:
        return tuple(self._errors)

    @property
    def weight_bytes(self) -> int:
        return sum(item.numel() * item.element_size() for item in self.stage.parameters())


def _compared(title: str, ways: Mapping[str, Work], seconds: float, *, about: str) -> dict[str, Any]:
    """Times of several ways to do a thing, in turn, and of each over the first one's in the same round.

    The order changes from round to round; both ranks start a round together.
    """
    names = list(ways)
    times: dict[str, list[float]] = {name: [] for name in names}
    work_times: dict[str, list[float]] = {name: [] for name in names}
    for work in ways.values():
        work()
    end = time.perf_counter() + seconds
    for turn in itertools.count():
        more = torch.tensor([float(time.perf_counter() < end or turn < 5)])
        dist.all_reduce(more, op=dist.ReduceOp.MIN)
        if not more.item():
            break
        for position in range(len(names)):
            name = names[(turn + position) % len(names)]
            dist.barrier()
            start, worked = time.perf_counter(), time.process_time()
            ways[name]()
            times[name].append(time.perf_counter() - start)
            work_times[name].append(time.process_time() - worked)
    first = names[0]
    return {
        "title": title,
        "about": about,
        "rows": [
            {
                "name": name,
                "seconds": asdict(summarise(times[name])),
                "ratio": asdict(_ratio(times[name], times[first])),
                "cpu_seconds": asdict(summarise(work_times[name])),
                "cpu_ratio": asdict(_ratio(work_times[name], work_times[first])),
            }
            for name in names
        ],
    }


def _ratio(taken: Sequence[float], first: Sequence[float]) -> SampleSummary:
    return summarise([one / other for one, other in zip(taken, first, strict=True)])


def _split_backward(name: str, captured: Captured, first: int, last: int, seconds: float) -> dict[str, Any]:
    """B against I and W; with the forward, which watches what is saved where the backward is in two parts."""
    bench = _Bench(captured, first, last)
    at_once, in_two = bench.runner(), bench.runner(parted=True)

    def whole() -> None:
        bench.forward(at_once)
        at_once.backward(0, bench.errors)
        at_once.end()

    def parted() -> None:
        bench.forward(in_two)
        in_two.input_gradient(0, bench.errors)
        in_two.weight_gradient(0)
        in_two.end()

    return _compared(
        f"{name}: a micro-batch with its backward at once or in two parts",
        {"F + B": whole, "F + I + W": parted},
        seconds,
        about=f"{format_bytes(bench.weight_bytes)} of weights, micro-batch {bench.size}",
    )


def _stashing(name: str, captured: Captured, first: int, last: int, seconds: float) -> dict[str, Any]:
    """One micro-batch in and one out, with an update: with as many versions of the weights as are in flight."""
    ways: dict[str, Work] = {}
    plain = _Bench(captured, first, last)
    runner = plain.runner()

    def without() -> None:
        plain.forward(runner)
        runner.backward(0, plain.errors)
        runner.end()
        plain.optimizer.step()
        plain.optimizer.zero_grad()

    ways["no stash"] = without
    for lag in (0, 1, 3):
        ways[f"{lag + 1} version{'s' if lag else ''}"] = _stashed(_Bench(captured, first, last), lag)
    return _compared(
        f"{name}: F, B and an update, with the weights stashed",
        ways,
        seconds,
        about=f"{format_bytes(plain.weight_bytes)} of weights, SGD with momentum",
    )


def _stashed(bench: _Bench, lag: int) -> Work:
    runners = [bench.runner() for _ in range(lag + 1)]
    stash = WeightVersions(dict(bench.stage.named_parameters()), lag)
    stash.begin(10**9)
    numbers = itertools.count(lag)
    for number in range(lag):
        bench.forward(runners[number], stash.weights(number))

    def work() -> None:
        number = next(numbers)
        bench.forward(runners[number % (lag + 1)], stash.weights(number))
        done = number - lag
        runners[done % (lag + 1)].backward(0, bench.errors)
        runners[done % (lag + 1)].end()
        stash.update(done, bench.optimizer.step)

    return work


def _replicas(options: argparse.Namespace) -> dict[str, Any]:
    """A mini-batch of two replicas, whose all-reduce overlaps the last backward or follows it."""
    # Several buckets of 25 MiB: one alone has nothing to overlap with.
    width, sequence, blocks = (32, 8, 3) if options.tiny else (512, 32, 8)
    sizes = {"vocabulary": 100, "sequence": sequence}
    module, args, kwargs = build_gpt(
        blocks=blocks, width=width, heads=4, tied=False, dropout=0.0, batch=4, **sizes
    )
    captured = capture(module, args, kwargs, check=False)
    cluster = read_cluster(str(ROOT / "examples" / "cluster-two-cpus.toml"))
    kinds = [cluster.types[item.type] for item in cluster.accelerators[:1]]
    ranks = tuple(Accelerator(name=f"localhost/{rank}", type=kinds[0].name, node="localhost") for rank in range(2))
    profile = analytic_profile(captured.to_model(), kinds, precision="fp32", microbatches=[4])
    request = Request(global_batch=8, microbatch=4, schedule="data-parallel", strategy="dp")
    plan = make_plan(explore(profile, replace(cluster, accelerators=ranks), request))
    plan = replace(plan, model=replace(plan.model, ref="bapipe.torch.zoo.gpt:build_gpt"))
    pipe = Pipeline(captured, plan, classes_loss)
    batch = gpt_batch(0, plan.global_batch, **sizes)
    overlapping = [(step, step.reducer) for step in pipe.executor._training]

    def step(overlap: bool, *, reduce: bool = True) -> Work:
        def work() -> None:
            for item, reducer in overlapping:
                item.reducer = reducer if overlap else None
            reducers = pipe.engine.reducers
            if not reduce:
                pipe.engine.reducers = {}
            pipe.step(*batch)
            pipe.engine.reducers = reducers
            for parameter in pipe.parameters():
                parameter.grad = None

        return work

    found = _compared(
        "gpt: a mini-batch of two replicas",
        {
            "no all-reduce": step(False, reduce=False),
            "all-reduce after the backward": step(False),
            "all-reduce beside the backward": step(True),
        },
        options.seconds,
        about=f"{format_bytes(sum(4 * item.numel() for item in pipe.parameters()))} of gradients over gloo",
    )
    pipe.close()
    return found


def table(found: dict[str, Any]) -> str:
    environment = found["environment"]
    lines = [
        f"{environment['name']}, torch {environment['torch']}, {environment['ranks']} ranks of "
        f"{environment['threads']} thread, load average at the end {environment['load_average']:.1f}. "
        "Medians with their 95 % intervals.",
        "",
    ]
    for comparison in found["comparisons"]:
        lines += [f"**{comparison['title']}** ({comparison['about']})", ""]
        lines += ["| | time | over the first | CPU time | over the first | rounds |", "|---|---|---|---|---|---|"]
        for row in comparison["rows"]:
            cells = [row["name"]]
            for taken, ratio in ((row["seconds"], row["ratio"]), (row["cpu_seconds"], row["cpu_ratio"])):
                cells.append(format_seconds(taken["median"]))
                cells.append(f"{ratio['median']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})")
            lines.append(f"| {' | '.join(cells)} | {row['seconds']['count']} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
