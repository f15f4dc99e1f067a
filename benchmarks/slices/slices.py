"""Plans trained on one GPU cut into slices by CUDA MPS: predicted beside measured, each in the same run.

    PYTHONPATH=src python3 benchmarks/slices/slices.py --out DIR --profiles profiles/h200 --count 4 \
        --models vgg16,resnet50,gnmt-8 --cases sno,so,gpipe,dp --steps 5 --budget-seconds 500

Slices are equal (--count) or not (--percentages 50,25,12.5,12.5). One process per slice lives through all cases.
First the links are measured, with all neighbours sending at once and then the all-reduce, and the plans are made
for them; then every plan trains a few mini-batches. Writes DIR/result.json (also when the budget runs out),
DIR/result.md and DIR/records.tar.gz with every plan and run. Needs torch and numpy only.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from cases import plan_case
from tables import result_table

from bapipe.cluster import Accelerator, AcceleratorType, Cluster, Link
from bapipe.compare import compare
from bapipe.errors import BaPipeError
from bapipe.plan import write_plan
from bapipe.profile import read_profile
from bapipe.run_record import read_run
from bapipe.torch import slices

MEMORY = 16e9
CASE_SECONDS = 100.0
"""after which a case is given up"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--profiles", type=Path, required=True, help="folder of MODEL-fp32.json")
    made.add_argument("--count", type=int, default=4)
    made.add_argument("--percentages", help="of slices that are not equal, such as 50,25,12.5,12.5")
    made.add_argument("--models", default="vgg16,resnet50,gnmt-8")
    made.add_argument("--cases", default="sno,so,gpipe,dp")
    made.add_argument("--steps", type=int, default=5)
    made.add_argument("--transport", default="auto")
    made.add_argument("--emulate", type=float, help="bytes/s of links slower than those there are")
    made.add_argument("--budget-seconds", type=float, default=500.0)
    return made


def main() -> None:
    options = parser().parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.budget_seconds
    shares = slices.even_slices(options.count)
    if options.percentages:
        shares = tuple(float(text) for text in options.percentages.split(","))
    cut = slices.start(shares, memory=MEMORY)
    rows: list[dict[str, Any]] = []
    links: dict[str, float] = {}
    workers = Workers(options, cut)
    try:
        links = workers.ask({"links": True}, 120)
        if options.emulate:
            links = {"bandwidth": options.emulate, "latency": links["latency"], "all_reduce": options.emulate}
        print("links", json.dumps(links), flush=True)
        for model in options.models.split(","):
            profile = read_profile(options.profiles / f"{model}-fp32.json")
            for case in options.cases.split(","):
                left = deadline - time.monotonic()
                if left < 30:
                    print("budget spent", flush=True)
                    return
                cluster = slice_cluster(
                    slices.even_slices(len(shares)) if case == "as-if-equal" else shares, links
                )
                found = run_case(options, workers, profile, cluster, case, min(left, CASE_SECONDS))
                row = {"model": model, "case": case, **found}
                rows.append(row)
                shown = (
                    "model",
                    "case",
                    "schedule",
                    "predicted",
                    "measured",
                    "throughput",
                    "error",
                    "memory_measured",
                )
                print(json.dumps({key: row[key] for key in shown if key in row}), flush=True)
    finally:
        workers.stop()
        slices.stop()
        result = {"slices": len(shares), "percentages": shares, "memory": MEMORY, "links": links, "rows": rows}
        if options.emulate:
            result["emulated"] = True
        with tarfile.open(options.out / "records.tar.gz", "w:gz") as archive:
            for path in sorted(options.out.glob("*-*.json")):
                archive.add(path, arcname=path.name)
                path.unlink()
        (options.out / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
        (options.out / "result.md").write_text(result_table(result), encoding="utf-8")


def slice_cluster(shares: tuple[float, ...], links: dict[str, float]) -> Cluster:
    """The slices, with the links as measured."""
    names = [f"h200-{share:g}pct" for share in shares]
    types = {
        name: AcceleratorType(
            name=name,
            kind="gpu",
            flops={"fp32": 64e12 * share / 100},
            memory=MEMORY,
            memory_bandwidth=4.3e12 * share / 100,
            execution="synchronous",
        )
        for name, share in zip(names, shares, strict=True)
    }
    return Cluster(
        name=f"one H200 in {len(shares)} slices",
        accelerators=tuple(
            Accelerator(name=f"localhost/{i}", type=name, node="localhost") for i, name in enumerate(names)
        ),
        types=types,
        within=Link(bandwidth=links["bandwidth"], latency=links["latency"]),
        collective_bandwidth=links["all_reduce"],
    )


def run_case(
    options: argparse.Namespace,
    workers: Workers,
    profile: Any,
    cluster: Cluster,
    case: str,
    left: float,
) -> dict[str, Any]:
    try:
        plan = plan_case(profile, cluster, case)
    except BaPipeError as error:
        return {"error": str(error)}
    path = options.out / f"{profile.model.name}-{case}.plan.json"
    write_plan(plan, path)
    run = path.with_name(f"{profile.model.name}-{case}.run.json")
    told = workers.ask(
        {
            "plan": str(path),
            "run": str(run),
            "steps": options.steps,
            "transport": options.transport,
            "emulate": options.emulate,
        },
        left,
    )
    if "error" in told:
        return {"predicted": plan.prediction.time, "error": told["error"]}
    record = read_run(run)
    found = compare(plan, record)
    seconds = sorted(step.seconds for step in record.steps[1:])
    measured = seconds[len(seconds) // 2]
    return {
        "schedule": plan.schedule.name,
        "microbatch": plan.microbatch_size,
        "minibatch": plan.minibatch,
        "split": sum(len(stage.fractions) for stage in plan.stages) // 2,
        "recompute": any(stage.recompute for stage in plan.stages),
        "predicted": plan.prediction.time,
        "measured": measured,
        "timeline": found.time.measured,
        "throughput": plan.minibatch / measured,
        "predicted_throughput": plan.prediction.throughput,
        "bubble": [found.bubble.predicted, found.bubble.measured],
        "losses": [step.loss for step in record.steps],
        "memory_predicted": [stage.memory_bytes for stage in plan.stages],
        "memory_measured": list(record.peak_memory),
        "peak_live": list(record.peak_live),
        "transport": record.environment.transport,
        "stages": [
            {
                "layers": [stage.first_layer, stage.last_layer],
                "fractions": [[part.layer, part.start, part.stop, part.of] for part in stage.fractions],
                "forward": [row.forward.predicted, row.forward.measured],
                "backward": [row.backward.predicted, row.backward.measured],
            }
            for stage, row in zip(plan.stages, found.stages, strict=False)
        ],
    }


class Workers:
    """One process per slice; rank 0 answers."""

    def __init__(self, options: argparse.Namespace, cut: slices.Slices) -> None:
        self._folder = options.out / "workers"
        self._folder.mkdir(exist_ok=True)
        self._count, self._cut = len(cut), cut
        self._processes: list[subprocess.Popen[bytes]] = []
        self._start()

    def _start(self) -> None:
        for path in self._folder.iterdir():
            path.unlink()
        self._asked = 0
        script = Path(__file__).with_name("worker.py")
        self._processes = []
        for rank in range(self._count):
            environment = {**os.environ, **slices.slice_environment(self._cut, rank), "PYTHONFAULTHANDLER": "1"}
            environment |= {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(self._count)}
            environment |= {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // self._count))}
            environment |= {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": str(self._count)}
            log = (self._folder / f"log-{rank}").open("w")
            command = [sys.executable, str(script), str(self._folder)]
            self._processes.append(subprocess.Popen(command, env=environment, stderr=log, stdout=log))

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Rank 0's answer; an error where a worker dies or the time is up."""
        number = self._asked
        self._asked += 1
        text = self._folder / f"request-{number}.part"
        text.write_text(json.dumps(request), encoding="utf-8")
        text.rename(self._folder / f"request-{number}.json")
        answer = self._folder / f"answer-{number}.json"
        end = time.monotonic() + seconds
        while not answer.exists():
            dead = [rank for rank, item in enumerate(self._processes) if item.poll() is not None]
            if dead or time.monotonic() > end:
                time.sleep(1.0)
                dead = [rank for rank, item in enumerate(self._processes) if item.poll() is not None]
                what = f"ranks {dead} ended" if dead else "no answer in time"
                told = self._told(dead or list(range(self._count)))
                self._kill()
                slices.stop()  # its server may have failed with a client that was killed in the middle of a kernel
                slices.start(self._cut.percentages, memory=self._cut.memory)
                self._start()
                return {"error": f"{what}: {told}"}
            time.sleep(0.05)
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found

    def _told(self, ranks: list[int]) -> str:
        """The end of what these ranks have said; of a live one where it stands."""
        for rank in ranks:
            if self._processes[rank].poll() is None:
                self._processes[rank].send_signal(signal.SIGUSR1)
        time.sleep(1.0)
        ends = [(self._folder / f"log-{rank}").read_text(encoding="utf-8")[-1500:] for rank in ranks]
        return "\n".join(f"[rank {rank}] {end}" for rank, end in zip(ranks, ends, strict=True))

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def stop(self) -> None:
        (self._folder / f"request-{self._asked}.json").write_text(json.dumps({"stop": True}), encoding="utf-8")
        deadline = time.monotonic() + 15
        while time.monotonic() < deadline and any(process.poll() is None for process in self._processes):
            time.sleep(0.05)
        self._kill()
        for path in self._folder.iterdir():
            path.unlink()
        self._folder.rmdir()


if __name__ == "__main__":
    main()
