"""What is run on the slices: the plan of each case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bapipe.costs.profile import Profile
from bapipe.errors import BaPipeError, nearest
from bapipe.hardware.cluster import Cluster
from bapipe.planner import Request, explore, make_plan
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.records.plan import Plan
from bapipe.schedule.generators import make_schedule, with_update
from bapipe.schedule.schedule_file import ScheduleFile

__all__ = ["CASES", "SIZES", "TORCH", "plan_case", "torch_time"]

CASES: dict[str, dict[str, Any]] = {
    "sno": {"schedule": "1f1b-sno", "stages": True},
    "so": {"schedule": "1f1b-so", "stages": True},
    "gpipe": {"schedule": "gpipe", "stages": True},
    "gpipe-8": {"schedule": "gpipe", "stages": True, "microbatches": 8},
    "dp": {"schedule": "data-parallel"},
    "dp-32": {"schedule": "data-parallel", "microbatch": 32, "microbatches": 1},
    "dp-64": {"schedule": "data-parallel", "microbatch": 64, "microbatches": 1},
    "pipedream": {"schedule": "pipedream", "strategy": "pipedream"},
    "uniform": {"schedule": "1f1b-so", "stages": True, "strategy": "uniform"},
    "so-split": {"schedule": "1f1b-so", "stages": True, "split_layers": True},
    "zb-h1": {"schedule": "zb-h1", "stages": True},
    "zb-h1-split": {"schedule": "zb-h1", "stages": True, "split_layers": True},
    "zb-h2-split": {"schedule": "zb-h2", "stages": True, "split_layers": True},
    "zb-split": {"schedule": "zb", "stages": True, "split_layers": True},
    "auto": {"split_layers": True},
    "as-if-equal": {"split_layers": True},
    "torch-1f1b": {"schedule": "1f1b-so", "stages": True},
    "torch-gpipe": {"schedule": "1f1b-so", "stages": True},
}
"""name -> what is asked of the planner

`stages`: as many as there are slices; `microbatches`: in a mini-batch (of each rank, with data parallelism),
instead of as many as make that of SIZES. as-if-equal is planned for as many equal slices. The torch cases have the
plan of so.
"""
TORCH = {"torch-1f1b": ("Schedule1F1B", "1f1b-sno"), "torch-gpipe": ("ScheduleGPipe", "gpipe")}
"""case -> torch's class, and the order that it runs as we call it"""
SIZES = {"vgg16": (32, 1024), "resnet50": (32, 1024), "gnmt-8": (64, 2048)}
"""model -> micro-batch, mini-batch"""


def plan_case(profile: Profile, cluster: Cluster, case: str, sizes: Mapping[str, tuple[int, int]] = SIZES) -> Plan:
    """The plan that is trained."""
    if case not in CASES:
        raise BaPipeError(f"unknown case '{case}'{nearest(case, CASES)}; known: {', '.join(CASES)}")
    asked = dict(CASES[case])
    own_size, global_batch = sizes[profile.model.name]
    if asked.pop("stages", False):
        asked["stages"] = len(cluster)
    size = asked.pop("microbatch", own_size)
    if "microbatches" in asked:
        ranks = len(cluster) if asked["schedule"] == "data-parallel" else 1
        global_batch = asked.pop("microbatches") * size * ranks
    return make_plan(explore(profile, cluster, Request(global_batch=global_batch, microbatch=size, **asked)))


def torch_time(plan: Plan, case: str) -> float:
    """Predicted seconds of a mini-batch on the plan's stages in the order of torch's schedule."""
    order = with_update(make_schedule(TORCH[case][1], len(plan.stages), plan.microbatches))
    stages = tuple(replace(stage, recompute=False) for stage in plan.stages)
    return plan_timeline(replace(plan, stages=stages, schedule=ScheduleFile.of(order))).time
