"""A small module on one rank: what a `Pipeline` can be made of without other processes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from bapipe.records.plan import Plan, PlanStage, read_plan
from bapipe.schedule.generators import make_schedule
from bapipe.schedule.schedule_file import ScheduleFile
from paths import REPOSITORY

__all__ = ["build", "one_rank"]


def build() -> tuple[nn.Module, tuple[torch.Tensor], dict[str, object]]:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)).double(), (torch.rand(4, 6).double(),), {}


def one_rank(*, compiled: bool = False) -> Plan:
    """The whole of `build` on one rank, in two micro-batches of four samples."""
    plan = read_plan(REPOSITORY / "examples" / "plan.json")
    stage: PlanStage = replace(plan.stages[0], first_layer=0, last_layer=1, layers=("0", "2"), recompute=False)
    return replace(
        plan,
        model=replace(plan.model, fingerprint=None),
        dtype="fp64",
        global_batch=8,
        microbatches=2,
        microbatch_size=4,
        stages=(stage,),
        schedule=ScheduleFile.of(make_schedule("1f1b-so", 1, 2)),
        compiled=compiled,
    )
