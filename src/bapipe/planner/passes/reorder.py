"""Pass: zero-bubble orders made for the times of the best pipelines' stages."""

from __future__ import annotations

from bapipe.planner.candidate import StageChoice
from bapipe.planner.evaluate import Evaluation
from bapipe.planner.incumbents import lightest
from bapipe.planner.intra_layer_cuts import splits_everywhere
from bapipe.planner.order_search import Moves, takes_orders, timed_plans
from bapipe.planner.state import SearchState

__all__ = ["reorder_pipelines"]


def reorder_pipelines(state: SearchState) -> None:
    """Add zb in an order made for its stages, and with cuts that suit it, where that saves enough.

    Such an order mostly holds more memory than the usual one, so it has to save `order_worth_memory`.
    """
    worth = state.tuning.order_worth_memory
    timed = lightest(_reordered(state), within=worth)
    held = state.incumbents.by_family.get("zb")
    if timed and held and (held.short is not None or timed.time < (1 - worth) * held.time):
        state.incumbents.add("zb", timed)


def _reordered(state: SearchState) -> list[Evaluation]:
    """The stages of the best pipelines without replicas, in orders of their own; the best one's cuts move too."""
    made: list[Evaluation] = []
    own = state.incumbents.by_family.get("zb")
    for number, start in enumerate(_starts(state)):
        moves: Moves = "none"
        if state.request.strategy == "exact" and (not number or start is own):
            split = splits_everywhere(start.candidate.chain, state.hardware, state.request, state.tuning)
            moves = "slices" if split else "layers"
        made += timed_plans(start, state.hardware, moves=moves, tuning=state.tuning)
    return made


def _starts(state: SearchState) -> list[Evaluation]:
    """The best pipelines of different stages that are small enough, near the best and do not recompute.

    And zb's own best, so that it is as good beside other schedules as it is where it is asked for alone.
    """
    own = state.incumbents.by_family.get("zb")
    if own is None:
        return []
    best, tuning = state.incumbents.best, state.tuning
    found: dict[tuple[StageChoice, ...], Evaluation] = {}
    for start in state.incumbents.ranked():
        near = best is None or start.time <= tuning.near_best * best.time
        if near and takes_orders(start, tuning):
            found.setdefault(start.candidate.stages, start)
    starts = list(found.values())[: tuning.reordered_pipelines]
    known = any(start.candidate.stages == own.candidate.stages for start in starts)
    return starts if known or not takes_orders(own, tuning) else [*starts, own]
