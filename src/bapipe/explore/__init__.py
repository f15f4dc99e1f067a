"""Profile + Cluster -> best Plan, its rivals and why they lost."""

from __future__ import annotations

from bapipe.explore.assemble import make_plan
from bapipe.explore.request import STRATEGIES, Request
from bapipe.explore.search import Exploration, explore, lower_bound

__all__ = ["STRATEGIES", "Exploration", "Request", "explore", "lower_bound", "make_plan"]
