"""TinyLlama's shape with long sequences at the memory limit: whole stages that recompute beside layers that do.

    python benchmarks/recompute/run.py --folder WORK --budget 900      on a GPU; goes on where it stopped
    python benchmarks/recompute/run.py --folder WORK --until profiles  likewise, and no further
    python benchmarks/recompute/run.py --folder WORK --until plans     anywhere, once profile and links are there
    python benchmarks/recompute/run.py --folder WORK --tiny            a rehearsal on two CPU ranks

The limit is found by the planner: of shares of what a plan without recomputation holds, the one at which plans
whose whole stages recompute lose most. There both are planned as they would be, run, and set beside what was
predicted.
README.md says what the columns are. A row that fails is a row, too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tinyllama"))

from work import Work, row_options  # noqa: E402

from bapipe.costs.profile import Profile, read_profile  # noqa: E402
from bapipe.errors import InfeasibleError  # noqa: E402
from bapipe.hardware.cluster import Cluster  # noqa: E402
from bapipe.hardware.cluster_file import read_cluster, with_memory_limit  # noqa: E402
from bapipe.planner import Exploration, Request, explore  # noqa: E402
from bapipe.records.plan import Plan, read_plan  # noqa: E402
from bapipe.records.run_record import read_run  # noqa: E402

SEQUENCE, SIZE, COUNT, STEPS = 4096, 1, 16, 7
SHARES = (0.85, 0.75, 0.65, 0.55, 0.47)
"""of what the fullest slice holds without recomputation"""
ROWS = ["layers", "stages", "layers 1f1b", "stages 1f1b"]
"""what may recompute, and the schedule where one is given"""
WAYS = {"layers": "auto", "stages": "stages"}
LEAST = 60
"""seconds left without which no row is begun"""


class Rows(Work):
    """The rows of this benchmark."""

    def profile(self) -> Path:
        path = self.folder / "profile.json"
        if not path.exists():
            sequence = 32 if self.tiny else SEQUENCE
            words = ["profile", "model:build", "--arg", f"sequence={sequence}", "--device", self.device]
            words += ["--arg", "tiny=true", "--precision", "fp32"] if self.tiny else ["--precision", "bf16"]
            words += ["--micro-batch", str(SIZE), "--optimizer", "adam", "--optimizer-arg", "fused=true"]
            self.bapipe(*words, "-o", str(path))
        return path

    def limit(self, schedule: str | None) -> float:
        """Bytes of a slice at which the rows are planned."""
        path = self.folder / f"limit-{schedule or 'any'}.json"
        if not path.exists():
            found = _limit(read_profile(self.profile()), read_cluster(str(self.cluster(self.transport))), schedule)
            print(f"[{self.left:5.0f} s left] limits: {json.dumps(found)}", flush=True)
            path.write_text(json.dumps(found, indent=1) + "\n")
        chosen = [own for own in json.loads(path.read_text()) if own["gain"] is not None]
        if not chosen:
            raise RuntimeError("at none of these limits do whole stages recompute")
        return float(max(chosen, key=lambda own: own["gain"])["bytes"])

    @property
    def transport(self) -> str:
        return "auto" if self.tiny else "ipc"

    def plan(self, name: str) -> Path:
        path = self.folder / f"plan-{name.replace(' ', '-')}.json"
        if not path.exists():
            way, _, schedule = name.partition(" ")
            words = ["plan", str(self.profile()), "--cluster", str(self.cluster(self.transport))]
            words += ["--out", str(path), "--global-batch", str(SIZE * COUNT), "--micro-batch", str(SIZE)]
            words += ["--memory-limit", f"{self.limit(schedule or None):.0f}B", "--recompute", WAYS[way]]
            self.bapipe(*words, *(["--schedule", schedule] if schedule else []))
        return path

    def row(self, name: str) -> dict[str, Any]:
        plan_file = self.plan(name)
        run_file = plan_file.with_name(plan_file.name.replace("plan-", "run-"))
        given = ["--steps", str(STEPS), "--out", str(run_file), "--learning-rate", "1e-4"]
        self.bapipe("run", str(plan_file), "--transport", self.transport, *given)
        return _row(read_plan(plan_file), run_file, self.limit(name.partition(" ")[2] or None))


def _limit(profile: Profile, cluster: Cluster, schedule: str | None) -> list[dict[str, Any]]:
    """What is predicted at every share of the memory that a plan without recomputation takes."""
    plain = _explored(profile, cluster, "never", schedule)
    if plain is None:
        raise RuntimeError(
            "nothing fits without recomputation, so that no limit follows from it; shorten sequences"
        )
    found = []
    for share in SHARES:
        limited = with_memory_limit(cluster, share * max(plain.best.memory))
        whole, layers = (_explored(profile, limited, way, schedule) for way in ("stages", "auto"))
        again = whole is not None and any(stage.recompute for stage in whole.best.candidate.stages)
        gain = layers.best.throughput / whole.best.throughput if again and whole and layers else None
        found.append({"share": share, "bytes": share * max(plain.best.memory), "gain": gain})
    return found


def _explored(profile: Profile, cluster: Cluster, way: str, schedule: str | None) -> Exploration | None:
    request = Request(
        global_batch=SIZE * COUNT, microbatch=SIZE, recompute=way, schedule=schedule, optimizer="adam(fused=true)"
    )
    try:
        return explore(profile, cluster, request)
    except InfeasibleError:
        return None


def _row(plan: Plan, run_file: Path, limit: float) -> dict[str, Any]:
    run = read_run(run_file)
    seconds = [step.seconds for step in run.steps]
    return {
        "limit": limit,
        "schedule": plan.schedule.name,
        "stages": [f"{stage.first_layer}-{stage.last_layer}" for stage in plan.stages],
        "whole_stages": [index for index, stage in enumerate(plan.stages) if stage.recompute],
        "layers": [f"{run.first}-{run.last}" for stage in plan.stages for run in stage.recompute_layers],
        "samples_per_second": plan.global_batch / median(seconds[2:]),
        "predicted": plan.global_batch / plan.prediction.time,
        "seconds": seconds,
        "losses": [step.loss for step in run.steps],
        "transport": run.environment.transport,
        "peaks": run.peak_memory,
        "predicted_peaks": [stage.memory_bytes for stage in plan.stages],
    }


def _table(known: dict[str, Any]) -> str:
    lines = [
        "| recompute | schedule | samples/s | predicted | fullest slice | predicted | recomputes |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, own in known.items():
        if "error" in own:
            lines.append(f"| {name} | {own['error']} | | | | | |")
            continue
        again = f"stages {own['whole_stages']}" if own["whole_stages"] else ", ".join(own["layers"]) or "nothing"
        sizes = [max((item or 0 for item in own[key]), default=0) / 1e9 for key in ("peaks", "predicted_peaks")]
        lines.append(
            f"| {name} | {own['schedule']} | {own['samples_per_second']:.3f} | {own['predicted']:.3f} | "
            f"{sizes[0]:.2f} GB | {sizes[1]:.2f} GB | {again} |"
        )
    for tail in ("", " 1f1b"):
        pair = [known.get(f"{way}{tail}", {}).get("samples_per_second") for way in ("layers", "stages")]
        if all(pair):
            lines.append(f"\nlayers over stages{tail}: {pair[0] / pair[1]:.3f}x")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = row_options(__doc__)
    parser.add_argument("--until", choices=("profiles", "plans", "rows"), default="rows", help="and no further")
    given = parser.parse_args()
    work = Rows(
        given.folder,
        HERE.parent / "tinyllama",
        tiny=given.tiny,
        budget=given.budget,
        cut_already=given.cut_already,
    )
    if given.until == "plans":
        for name in ROWS:
            work.plan(name)
        return
    if given.until == "profiles":
        work.start_slices()
        try:
            work.cluster(work.transport)
            work.profile()
        finally:
            work.stop_slices()
        return
    table = work.folder / "result.md"
    work.run_rows(ROWS, given.rows, least=LEAST, after=lambda known: table.write_text(_table(known)))


if __name__ == "__main__":
    main()
