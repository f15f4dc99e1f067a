"""Runs of `bapipe run` that are saved, and how to kill a rank of one."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoint_plans import Leg, cut_plan

from bapipe.costs.profile import read_profile
from bapipe.records.plan import Plan
from bapipe.schedule.generators import make_schedule, with_update

__all__ = ["COMMAND", "ENVIRONMENT", "PROFILE", "ROOT", "descendants", "ranks_of", "run", "states", "tiny_plan"]

ROOT = Path(__file__).resolve().parents[2]
PROFILE = ROOT / "examples" / "tiny-profile.json"
COMMAND = (sys.executable, "-m", "bapipe", "run")
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
LAYERS = {1: 6, 2: 6, 3: 8}
"""by stages: of the model, which for three is that of the profile"""


def tiny_plan(stages: int, *, hidden: int = 96) -> Plan:
    """A plan of the example's model, with Adam, in fp32."""
    profile = read_profile(PROFILE)
    layers = LAYERS[stages]
    names = [*(f"layer{index}" for index in range(layers - 1)), "head"]
    ends = tuple((names[layers * stage // stages - 1], None) for stage in range(1, stages))
    leg = Leg(name="tiny", schedule=with_update(make_schedule("1f1b-so", stages, 4)), cuts=ends)
    plan = cut_plan(leg, names, [None] * layers, size=8, fingerprint="")
    model = replace(profile.model, args={"hidden": hidden, "layers": layers}, fingerprint=None)
    return replace(plan, model=model, dtype="fp32", optimizer="adam")


def run(plan: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """`bapipe run` to its end."""
    return subprocess.run(
        [*COMMAND, str(plan), *options],
        cwd=plan.parent,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def states(folder: Path) -> dict[str, Any]:
    """All tensors of a folder's last checkpoint, those of the optimizer too."""
    from bapipe.torch.checkpoint.whole_model import CheckpointState

    state = CheckpointState(folder)
    found = {f"optimizer {name} {entry}": value for name, entry, value in state.optimizer()}
    return {**dict(state), **found}


def ranks_of(process: int) -> dict[int, int]:
    """rank -> process, of those of a launched run that live."""
    found = {}
    for worker in descendants(process):
        try:
            command = Path(f"/proc/{worker}/cmdline").read_bytes().split(b"\0")
            variables = Path(f"/proc/{worker}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        rank = next((item.removeprefix(b"RANK=") for item in variables if item.startswith(b"RANK=")), None)
        if b"bapipe.torch.launch.worker" in command and rank is not None:
            found[int(rank)] = worker
    return found


def descendants(process: int) -> list[int]:
    """Processes that a process has started, and those that they have."""
    try:
        tasks = list(Path(f"/proc/{process}/task").iterdir())
        children = [int(item) for task in tasks for item in (task / "children").read_text().split()]
    except OSError:
        return []
    return [item for child in children for item in (child, *descendants(child))]
