"""Profile + Cluster -> best Plan, its alternatives and why they lost."""

from __future__ import annotations

from bapipe.planner.assemble_plan import make_plan
from bapipe.planner.race import race_candidates, unraced_candidates
from bapipe.planner.request import STRATEGIES, Request
from bapipe.planner.search import Exploration, explore, lower_bound

__all__ = [
    "STRATEGIES",
    "Exploration",
    "Request",
    "explore",
    "lower_bound",
    "make_plan",
    "race_candidates",
    "unraced_candidates",
]
