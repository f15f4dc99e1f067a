"""What sharding saves and costs on slices of one GPU: ZeRO-1 beside plain data parallelism, DDP and FSDP2.

    python benchmarks/sharding/run.py --folder WORK --ranks 4 --budget 500     on a GPU; goes on where it stopped
    python benchmarks/sharding/run.py --folder WORK --ranks 8 --budget 500     in another folder
    python benchmarks/sharding/run.py --folder WORK --tiny                     a rehearsal on two CPU ranks

`fits …` rows look for the deepest GPT that a slice holds under fused Adam, from the depth that is predicted
on; `time …` rows train a GPT of 100 million parameters as each engine has it. A row that fails is a row, too.
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

from bapipe.records.plan import Plan, read_plan  # noqa: E402
from bapipe.records.run_record import read_run  # noqa: E402
from bapipe.units import parse_bytes  # noqa: E402

ROWS = ["time dp", "time zero", "time ddp", "time fsdp", "fits zero", "fits plain"]
"""in the order in which they are worth their time"""
LEAST = 60
"""seconds left without which no row is begun"""
STEPS = 7
SHAPES: dict[str, dict[str, int]] = {
    "time": {"blocks": 12, "width": 768, "heads": 12, "vocabulary": 16384, "sequence": 256},
    "fits": {"width": 1536, "heads": 12, "vocabulary": 8192, "sequence": 64},
    "tiny": {"blocks": 3, "width": 64, "heads": 2, "vocabulary": 256, "sequence": 16},
}
MEMORY = {4: "16GB", 8: "14GB"}
"""of each of so many slices"""
PROBES = (4, 8)
"""depths whose predictions say what a block more needs"""
LOWER = 3
"""depths below the predicted one that are tried"""


class Rows(Work):
    """The rows of this benchmark."""

    def plan(self, name: str, shape: dict[str, int], size: int, count: int, *words: str) -> Path:
        """Profile a GPT of this shape, once, and plan it."""
        told = "-".join(str(shape[key]) for key in ("blocks", "width"))
        profile = self.folder / f"profile-{told}.json"
        if not profile.exists():
            given = [word for key, value in shape.items() for word in ("--arg", f"{key}={value}")]
            given += ["--arg", "dropout=0.0", "--micro-batch", str(size), "--device", self.device]
            given += ["--optimizer", "adam", "--optimizer-arg", "fused=true"]
            self.bapipe("profile", "bapipe.torch.zoo.gpt:build_gpt", *given, "-o", str(profile))
        plan = self.folder / f"plan-{name}-{told}.json"
        given = ["--global-batch", str(size * count * self.ranks), "--micro-batch", str(size), "--out", str(plan)]
        self.bapipe("plan", str(profile), "--cluster", str(self.cluster("nccl")), *given, *words)
        return plan

    def measured(self, plan_file: Path, steps: int) -> dict[str, Any]:
        """Run a plan, and set what it took beside what was predicted."""
        run_file = plan_file.with_name(plan_file.name.replace("plan-", "run-"))
        transport = ["--transport", "auto" if self.tiny else "nccl"]
        self.bapipe("run", str(plan_file), "--steps", str(steps), "--out", str(run_file), *transport)
        plan, run = read_plan(plan_file), read_run(run_file)
        seconds = median([step.seconds for step in run.steps][2:] or [run.steps[-1].seconds])
        peaks = [peak for peak in run.peak_memory if peak is not None]
        return {
            "engine": plan.engine,
            "zero_stage": plan.zero_stage,
            "parameters": _parameters(plan),
            "seconds": seconds,
            "predicted_seconds": plan.prediction.time,
            "time_error": plan.prediction.time / seconds - 1,
            "peak": max(peaks),
            "predicted_peak": plan.stages[0].memory_bytes,
            "memory_error": plan.stages[0].memory_bytes / max(peaks) - 1,
            "losses": [step.loss for step in run.steps],
        }

    def time(self, kind: str) -> dict[str, Any]:
        shape = SHAPES["tiny" if self.tiny else "time"]
        words = ["--strategy", kind] if kind in ("ddp", "fsdp") else ["--strategy", "dp", "--zero-stage"]
        words += {"dp": ["0"], "zero": ["1"]}.get(kind, [])
        return self.measured(self.plan(kind, shape, 4, 2, *words), STEPS)

    def fits(self, kind: str) -> dict[str, Any]:
        """The deepest that trains, from the predicted depth down."""
        zero = "1" if kind == "zero" else "0"
        words = ["--strategy", "dp", "--zero-stage", zero]
        base = {**SHAPES["fits"], **({"width": 64, "heads": 2, "vocabulary": 256} if self.tiny else {})}
        few, more = (
            read_plan(self.plan(f"probe-{kind}", {"blocks": blocks, **base}, 1, 1, *words)) for blocks in PROBES
        )
        first, second = few.stages[0].memory_bytes, more.stages[0].memory_bytes
        each = (second - first) / (PROBES[1] - PROBES[0])
        room = 40e6 if self.tiny else parse_bytes(self.memory, what="memory")
        depth = int(PROBES[0] + (room - first) / each)
        tried: dict[str, str] = {}
        for blocks in range(depth, depth - LOWER - 1, -1):
            try:
                plan = self.plan(kind, {"blocks": blocks, **base}, 1, 1, *words)
                return {"blocks": blocks, "predicted_blocks": depth, **self.measured(plan, 3), "failed": tried}
            except RuntimeError as error:
                if "no time left" in str(error):
                    raise
                tried[str(blocks)] = str(error)[:200]
        return {"error": f"none of {', '.join(tried)} blocks trains", "failed": tried, "predicted_blocks": depth}

    def row(self, name: str) -> dict[str, Any]:
        what, kind = name.split()
        return self.time(kind) if what == "time" else self.fits(kind)


def _parameters(plan: Plan) -> int:
    return round(sum(stage.weight_bytes for stage in plan.stages) / 4)


def summary(known: dict[str, Any], ranks: int) -> dict[str, Any]:
    """How much larger the model is, beside copies of the weights: 4 under fused Adam, 2 + 2/r with ZeRO-1."""
    both = [known.get(f"fits {kind}", {}).get("parameters") for kind in ("zero", "plain")]
    if None in both:
        return {}
    wanted = 4 / (2 + 2 / ranks)
    return {"ratio": both[0] / both[1], "copies": wanted, "share_of_copies": both[0] / both[1] / wanted}


def main() -> None:
    parser = row_options(__doc__)
    parser.add_argument("--ranks", type=int, choices=(4, 8), default=4)
    given = parser.parse_args()
    memory = MEMORY[given.ranks]
    cut = {"ranks": given.ranks, "memory": memory, "cut_already": given.cut_already}
    work = Rows(given.folder, HERE, tiny=given.tiny, budget=given.budget, **cut)
    known = work.run_rows(ROWS, given.rows, least=LEAST)
    found = summary(known, work.ranks)
    (work.folder / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
