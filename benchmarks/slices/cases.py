"""What is run on the slices: the plan of each case."""

from __future__ import annotations

from typing import Any

from bapipe.cluster import Cluster
from bapipe.explore import Request, explore, make_plan
from bapipe.plan import Plan
from bapipe.profile import Profile

CASES: dict[str, dict[str, Any]] = {
    "sno": {"schedule": "1f1b-sno", "stages": True},
    "so": {"schedule": "1f1b-so", "stages": True},
    "gpipe": {"schedule": "gpipe", "stages": True},
    "dp": {"schedule": "data-parallel"},
    "so-split": {"schedule": "1f1b-so", "stages": True, "split_layers": True},
    "zb-h1": {"schedule": "zb-h1", "stages": True},
    "zb-h1-split": {"schedule": "zb-h1", "stages": True, "split_layers": True},
    "zb-h2-split": {"schedule": "zb-h2", "stages": True, "split_layers": True},
    "auto": {"split_layers": True},
}
"""name -> what is asked of the planner; `stages`: as many as there are slices"""
MICROBATCHES = {"vgg16": 32, "resnet50": 32, "gnmt-8": 64}
MINIBATCHES = {"vgg16": 1024, "resnet50": 1024, "gnmt-8": 2048}


def plan_case(profile: Profile, cluster: Cluster, case: dict[str, Any], *, minibatch: int) -> Plan:
    asked = dict(case)
    if asked.pop("stages", False):
        asked["stages"] = len(cluster)
    request = Request(minibatch=minibatch, microbatch=MICROBATCHES[profile.model.name], **asked)
    return make_plan(explore(profile, cluster, request))
