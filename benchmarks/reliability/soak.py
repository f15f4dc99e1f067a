"""The soak: thousands of steps on two ranks, with saves and evaluations, after which nothing has grown.

README.md says what flat means. Writes result-soak.json here, or result-soak-slices.json with --slices (or --out).
With --seconds and --work a soak is run in several calls: each goes on from the checkpoint of the one before, and
the last one writes the result.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from fault_cases import SLICES, make_plan
from faults import environment

from bapipe.io.files import write_text
from bapipe.records.plan import write_plan
from bapipe.torch.launch.launcher import start_script

HERE = Path(__file__).resolve().parent
SAMPLES = 100
"""times that each rank is looked at"""
LEAST = 10
"""samples that a process must have to be judged"""
GROWTH = 2 * 2**20
"""bytes that the resident memory of a process may have grown between the second and the last fifth of a run"""
DIFFERENCE = 1e-9
"""that a loss may differ by, relative, from that of one process: float64, and other orders of the same sums"""


def growth(rows: list[dict[str, int]], what: str) -> float:
    """The median of the last fifth of the samples less that of the second: the first fifth warms up."""
    values = [row[what] for row in rows]
    fifth = len(values) // 5
    return statistics.median(values[-fifth:]) - statistics.median(values[fifth : 2 * fifth])


def judged(ranks: list[dict[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """What grew on each rank, how far losses are off, and what of it is not as it must be.

    A rank's samples are those of all its processes, one after the other where there were several calls; what
    grew is the most of any.
    """
    problems, grown = [], []
    for found in ranks:
        parts = [part for part in found["parts"] if len(part) >= LEAST]
        own = {
            key: max(growth(part, key) for part in parts)
            for key in found["parts"][0][0]
            if key not in ("step", "python_threads") and parts
        }
        grown.append(own)
        if not parts:
            problems.append(f"rank {found['rank']}: no call is long enough to be judged")
        for key, value in own.items():
            if value > (GROWTH if key == "resident" else 0):
                problems.append(f"rank {found['rank']}: {key} grew by {value:g}")
    losses, alone = ranks[0]["losses"], ranks[0]["alone"]
    off = max(abs(one - other) / abs(other) for one, other in zip(losses, alone, strict=True))
    if not off <= DIFFERENCE:
        problems.append(f"a loss differs from one process by {off:.1e}")
    figures = {
        "growth": grown,
        "loss_difference": off,
        "losses_equal_to_the_bit": sum(one == other for one, other in zip(losses, alone, strict=True)),
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }
    return figures, problems


def _joined(folder: Path, rank: int) -> dict[str, Any]:
    """What a rank did in all calls; a call that was killed is repeated from the checkpoint before it."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob(f"part-*-{rank}.json"))]
    losses: list[float] = []
    for part in found:
        del losses[part["first"] :]
        losses += part["losses"]
    return {
        "rank": rank,
        "parts": [part["samples"] for part in found if part["samples"]],
        "losses": losses,
        "alone": found[-1].get("alone", []),
        "seconds": sum(part["seconds"] for part in found),
        "evaluations": sum(part["evaluations"] for part in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, help="5000, or 1000 on slices")
    parser.add_argument("--schedule", default="1f1b-sno", help="one of two ranks of fault_cases.SCHEDULES")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--slices", action="store_true", help="with cuda: a slice of the GPU for each rank (MPS)")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--seconds", type=float, default=1e9, help="end after so long, saved; --work goes on")
    parser.add_argument("--work", type=Path, help="folder of a soak in several calls; it stays until the last")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    steps = given.steps or (1000 if given.slices else 5000)
    settings = {
        "steps": steps,
        "every": max(1, steps // 20),
        "evaluations": max(1, steps // 50),
        "samples": max(1, steps // SAMPLES),
        "device": given.device,
        "transport": given.transport,
    }
    folder = given.work or Path(tempfile.mkdtemp(prefix="bapipe-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    plan = make_plan(given.schedule, device=given.device, sliced=given.slices)
    write_plan(plan, folder / "plan.json")
    if given.slices:
        from bapipe.torch import slices

        slices.start(slices.even_slices(SLICES), memory=16e9)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        asked = json.dumps({**settings, "seconds": given.seconds})
        code = start_script(len(plan.ranks), [str(HERE / "soak_worker.py"), asked, str(folder)])
    finally:
        if given.slices:
            slices.stop()
    if code:
        raise SystemExit(f"the soak ended with code {code}")
    ranks = [_joined(folder, rank) for rank in range(len(plan.ranks))]
    done = len(ranks[0]["losses"])
    if done < steps:
        print(f"{done} of {steps} steps; the same command with --work {folder} goes on")
        return
    figures, problems = judged(ranks)
    result = {
        "environment": environment(),
        "settings": {"schedule": given.schedule, **settings, "growth_allowed": GROWTH},
        "seconds": round(ranks[0]["seconds"], 1),
        "evaluations": ranks[0]["evaluations"],
        "checkpoints": steps // settings["every"],
        **figures,
        "problems": problems,
        "calls": len(ranks[0]["parts"]),
        "samples": [[row for part in found["parts"] for row in part] for found in ranks],
    }
    out = given.out or HERE / ("result-soak-slices.json" if given.slices else "result-soak.json")
    write_text(out, json.dumps(result, indent=1) + "\n")
    shutil.rmtree(folder)
    print(json.dumps({key: value for key, value in result.items() if key != "samples"}))
    if problems:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
