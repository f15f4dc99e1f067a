"""Profile + Cluster -> best Plan, its alternatives and why they lost."""

from __future__ import annotations

from bapipe.planner.assemble_plan import make_plan
from bapipe.planner.race import race_candidates, unraced_candidates
from bapipe.planner.request import STRATEGIES, Request
from bapipe.planner.search import Exploration, lower_bound
from bapipe.planner.ways import explore, other_way_of

__all__ = [
    "STRATEGIES",
    "Exploration",
    "Request",
    "explore",
    "lower_bound",
    "make_plan",
    "other_way_of",
    "race_candidates",
    "unraced_candidates",
]
