"""What is run on the slices: the plan of each case."""

from __future__ import annotations

from typing import Any

from bapipe.cluster import Cluster
from bapipe.explore import Request, explore, make_plan
from bapipe.plan import Plan
from bapipe.profile import Profile

__all__ = ["CASES", "MICROBATCHES", "MINIBATCHES", "plan_case"]

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
    "auto": {"split_layers": True},
    "as-if-equal": {"split_layers": True},
}
"""name -> what is asked of the planner

`stages`: as many as there are slices; `microbatches`: in a mini-batch (of each rank, with data parallelism),
instead of as many as make MINIBATCHES. as-if-equal is planned for as many equal slices.
"""
MICROBATCHES = {"vgg16": 32, "resnet50": 32, "gnmt-8": 64}
MINIBATCHES = {"vgg16": 1024, "resnet50": 1024, "gnmt-8": 2048}


def plan_case(profile: Profile, cluster: Cluster, case: str) -> Plan:
    """The plan that is trained."""
    asked = dict(CASES[case])
    name = profile.model.name
    if asked.pop("stages", False):
        asked["stages"] = len(cluster)
    size = asked.pop("microbatch", MICROBATCHES[name])
    minibatch = MINIBATCHES[name]
    if "microbatches" in asked:
        ranks = len(cluster) if asked["schedule"] == "data-parallel" else 1
        minibatch = asked.pop("microbatches") * size * ranks
    return make_plan(explore(profile, cluster, Request(minibatch=minibatch, microbatch=size, **asked)))
