"""Pass: what BaPipe does not run, by formula."""

from __future__ import annotations

from bapipe.planner.data_parallel import analytic_alternatives
from bapipe.planner.state import SearchState

__all__ = ["estimate_alternatives"]


def estimate_alternatives(state: SearchState) -> None:
    """Add time and memory of tensor slicing at the plan's micro-batch size."""
    if state.paper:
        return
    chain = state.best.candidate.chain
    found = analytic_alternatives(chain, state.hardware, state.global_batch // chain.microbatch)
    state.estimates = tuple(item for item in found if item.name.startswith("tensor"))
