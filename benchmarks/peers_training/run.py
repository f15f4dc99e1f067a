"""Models on slices of one GPU: the automatic plan, by NCCL and as it chooses, other plans, and torch's own DDP.

    python benchmarks/peers_training/run.py --folder WORK --budget 500 --rows vit-l     on a GPU
    python benchmarks/peers_training/run.py --folder WORK --tiny                        on two CPU ranks

Every row of a model has the same global batch, optimizer implementation and precision, and 16 GB a slice. A row is
named by its words: `ours MODEL PRECISION compiled|eager TRANSPORT [SCHEDULE]` or `ddp MODEL PRECISION
compiled|eager`. It goes on where it stopped; a row that fails is a row, too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tinyllama"))

from work import ROOT, Work, row_options  # noqa: E402

from bapipe.records.plan import read_plan  # noqa: E402
from bapipe.records.run_record import read_run  # noqa: E402
from models import MODELS  # noqa: E402

STEPS = 7
ROWS = [
    "ours vit-l bf16 compiled nccl",
    "ours resnet50 fp32 eager nccl data-parallel",
    "ddp resnet50 fp32 eager",
    "ours gnmt-8 fp32 eager nccl data-parallel",
    "ddp gnmt-8 fp32 eager",
    "ours convnext-l bf16 eager nccl",
    "ours vit-l bf16 compiled nccl zb-h1",
    "ours vit-l bf16 compiled nccl data-parallel",
    "ddp vit-l bf16 compiled",
    "ours vit-l bf16-mixed eager nccl",
    "ours convnext-l fp32 eager nccl",
    "ours gpt2-medium bf16 compiled nccl",
    "ddp gpt2-medium bf16 compiled",
]
"""in the order in which they are worth their time"""
LEAST = 40
"""seconds left without which no row is begun"""


class Rows(Work):
    """The rows of this benchmark."""

    def profile(self, name: str, precision: str, how: str) -> Path:
        """Measured, unless it is one of the profiles that the repository has."""
        known = ROOT / "profiles" / "h200" / "with-loss" / f"{name}-{precision}.json"
        if how == "eager" and known.exists() and not self.tiny:
            return known
        path, about = self.folder / f"profile-{name}-{precision}-{how}.json", MODELS[name]
        if not path.exists():
            words = ["profile", about.spec, *about.arguments(tiny=self.tiny), "--precision", precision]
            words += ["--micro-batch", str(about.size), "--optimizer", about.optimizer, "--device", self.device]
            words += [] if self.tiny else ["--optimizer-arg", "fused=true"]
            self.bapipe(*words, *(["--compile"] if how == "compiled" else []), "-o", str(path))
        return path

    def ours(self, row: str) -> dict[str, Any]:
        name, precision, how, transport, *schedule = row.split()[1:]
        about, stem = MODELS[name], row.replace(" ", "-")
        plan_file, run_file = self.folder / f"plan-{stem}.json", self.folder / f"run-{stem}.json"
        words = ["plan", str(self.profile(name, precision, how)), "--cluster", str(self.cluster(transport))]
        words += ["--global-batch", str(about.size * about.count), "--micro-batch", str(about.size)]
        words += ["--optimizer", about.optimizer, *([] if self.tiny else ["--optimizer-arg", "fused=true"])]
        self.bapipe(*words, *(["--schedule", *schedule] if schedule else []), "--out", str(plan_file))
        given = ["--transport", "auto" if self.tiny else transport, "--steps", str(STEPS), "--out", str(run_file)]
        self.bapipe("run", str(plan_file), *given, "--learning-rate", "1e-4")
        plan, run = read_plan(plan_file), read_run(run_file)
        seconds = [step.seconds for step in run.steps]
        return {
            "schedule": plan.schedule.name,
            "stages": [f"{stage.first_layer}-{stage.last_layer}" for stage in plan.stages],
            "samples_per_second": plan.global_batch / median(seconds[2:]),
            "predicted": plan.global_batch / plan.prediction.time,
            "seconds": seconds,
            "losses": [step.loss for step in run.steps],
            "transport": run.environment.transport,
            "peaks": run.peak_memory,
            "predicted_peaks": [stage.memory_bytes for stage in plan.stages],
        }

    def ddp(self, row: str) -> dict[str, Any]:
        name, precision, how = row.split()[1:]
        out = self.folder / "peer.json"
        out.unlink(missing_ok=True)
        words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        words += ["--nproc-per-node", str(self.ranks), str(HERE / "ddp_peer.py"), str(out), "--model", name]
        words += ["--precision", precision, "--steps", str(STEPS), "--device", self.device]
        self.run(*words, *(["--compile"] if how == "compiled" else []), *(["--tiny"] if self.tiny else []))
        return {"schedule": "DistributedDataParallel", "transport": "nccl", **json.loads(out.read_text())}

    def row(self, name: str) -> dict[str, Any]:
        return self.ours(name) if name.startswith("ours ") else self.ddp(name)


def main() -> None:
    given = row_options(__doc__).parse_args()
    work = Rows(given.folder, HERE, tiny=given.tiny, budget=given.budget)
    work.run_rows(ROWS, given.rows, least=LEAST)


if __name__ == "__main__":
    main()
