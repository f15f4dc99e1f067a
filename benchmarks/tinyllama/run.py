"""TinyLlama's shape on four slices of one GPU: our plans, by NCCL and as they choose, beside torch's schedules.

    python benchmarks/tinyllama/run.py --folder WORK --budget 500      on a GPU; goes on where it stopped
    python benchmarks/tinyllama/run.py --folder WORK --tiny            a rehearsal on two CPU ranks

Every row trains the same blocks with the same global batch (16 micro-batches of 4), fused Adam and 16 GB a slice.
README.md says what the columns are. A row that fails is a row, too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from work import Work, row_options

from bapipe.records.plan import Plan, read_plan
from bapipe.records.run_record import read_run

HERE = Path(__file__).resolve().parent
SIZE, COUNT, STEPS = 4, 16, 7
SEQUENCES = {"bf16": 1024, "fp32": 256}
ROWS = [
    "ours bf16 compiled nccl",
    "torch bf16 compiled Schedule1F1B ourcut",
    "ours fp32 compiled nccl",
    "torch fp32 eager ScheduleZBVZeroBubble",
    "torch fp32 eager ScheduleZBVZeroBubble ourcut",
    "torch fp32 eager ScheduleInterleavedZeroBubble",
    "torch fp32 compiled Schedule1F1B ourcut",
    "ours bf16 compiled auto",
    "torch bf16 compiled Schedule1F1B",
    "torch fp32 compiled Schedule1F1B",
    "ours fp32 compiled auto",
    "torch bf16 eager ScheduleZBVZeroBubble",
    "ours bf16 eager nccl",
    "ours bf16-mixed compiled auto",
]
"""in the order in which they are worth their time"""
LEAST = 45
"""seconds left without which no row is begun"""


class Rows(Work):
    """The rows of this benchmark."""

    def profile(self, precision: str, compiled: bool) -> Path:
        path = self.folder / f"profile-{precision}-{'compiled' if compiled else 'eager'}.json"
        if not path.exists():
            words = ["profile", "model:build", *self.arguments(precision), "--precision", precision]
            words += ["--micro-batch", str(SIZE), "--optimizer", "adam", "--device", self.device]
            words += ["--optimizer-arg", "fused=true"]
            self.bapipe(*words, *(["--compile"] if compiled else []), "-o", str(path))
        return path

    def arguments(self, precision: str) -> list[str]:
        sequence = 16 if self.tiny else SEQUENCES[precision.partition("-")[0]]
        return ["--arg", f"sequence={sequence}", *(["--arg", "tiny=true"] if self.tiny else [])]

    def ours(self, precision: str, how: str, transport: str) -> dict[str, Any]:
        profile = self.profile(precision, how == "compiled")
        plan_file = self.folder / f"plan-{precision}-{how}-{transport}.json"
        words = ["plan", str(profile), "--cluster", str(self.cluster(transport)), "--out", str(plan_file)]
        self.bapipe(*words, "--global-batch", str(SIZE * COUNT), "--micro-batch", str(SIZE))
        run_file = self.folder / f"run-{precision}-{how}-{transport}.json"
        given = ["--transport", "auto" if self.tiny else transport, "--steps", str(STEPS), "--out", str(run_file)]
        self.bapipe("run", str(plan_file), *given, "--learning-rate", "1e-4")
        plan, run = read_plan(plan_file), read_run(run_file)
        seconds = [step.seconds for step in run.steps]
        return {
            "schedule": plan.schedule.name,
            "stages": [f"{stage.first_layer}-{stage.last_layer}" for stage in plan.stages],
            "cuts": _cuts(plan),
            "samples_per_second": plan.global_batch / median(seconds[2:]),
            "predicted": plan.global_batch / plan.prediction.time,
            "seconds": seconds,
            "losses": [step.loss for step in run.steps],
            "transport": run.environment.transport,
            "peaks": run.peak_memory,
            "predicted_peaks": [stage.memory_bytes for stage in plan.stages],
        }

    def torch(self, dtype: str, how: str, schedule: str, cuts: str | None) -> dict[str, Any]:
        out = self.folder / "peer.json"
        out.unlink(missing_ok=True)
        words = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(self.ranks),
        ]
        words += [str(HERE / "peer.py"), str(out), "--schedule", schedule, "--dtype", dtype, "--steps", str(STEPS)]
        words += ["--sequence", "16" if self.tiny else str(SEQUENCES[dtype]), "--device", self.device]
        words += ["--microbatches", str(COUNT), "--size", str(SIZE)]
        words += [*(["--compile"] if how == "compiled" else []), *(["--tiny"] if self.tiny else [])]
        self.run(*words, *(["--cuts", cuts] if cuts else []))
        return {"schedule": schedule, "transport": "nccl", **json.loads(out.read_text())}

    def row(self, name: str) -> dict[str, Any]:
        engine, precision, how, *rest = name.split()
        if engine == "ours":
            return self.ours(precision, how, rest[0])
        return self.torch(precision, how, rest[0], self.cuts(precision, rest[0]) if len(rest) > 1 else None)

    def cuts(self, precision: str, schedule: str) -> str:
        """Where our best plan with as many stages as that schedule has cuts, in blocks."""
        name, stages = ("zb-v", 2 * self.ranks) if "ZBV" in schedule else ("1f1b-so", self.ranks)
        plan_file = self.folder / f"cuts-{precision}-{name}.json"
        words = ["plan", str(self.profile(precision, True)), "--cluster", str(self.cluster("nccl"))]
        words += ["--global-batch", str(SIZE * COUNT), "--micro-batch", str(SIZE), "--schedule", name]
        self.bapipe(*words, *(["--stages", str(stages)] if name == "1f1b-so" else []), "--out", str(plan_file))
        plan = read_plan(plan_file)
        if len(plan.stages) != stages:
            raise RuntimeError("our plan has no cut that torch's stages can have")
        return _cuts(plan)


def _cuts(plan: Plan) -> str:
    return ",".join(str(_block(stage.layers[0])) for stage in plan.stages[1:])


def _block(layer: str) -> int:
    """The block that a stage begins with, or the next one where it begins in the middle of one."""
    words = layer.split(".")
    if "layers" not in words:
        return 0
    number = int(words[words.index("layers") + 1])
    return number if "self_attn" in layer or "input_layernorm" in layer else number + 1


def main() -> None:
    given = row_options(__doc__).parse_args()
    work = Rows(given.folder, HERE, tiny=given.tiny, budget=given.budget, cut_already=given.cut_already)
    work.run_rows(ROWS, given.rows, least=LEAST)


if __name__ == "__main__":
    main()
