"""Pass: quicker orders of the pipelines whose orders are listed for their times."""

from __future__ import annotations

import math

from bapipe.planner.effort import effort_of
from bapipe.planner.evaluate import Evaluation
from bapipe.planner.incumbents import rank
from bapipe.planner.order_moves import MoveEffort, quicker_order
from bapipe.planner.state import SearchState

__all__ = ["move_actions"]


def move_actions(state: SearchState) -> None:
    """Add the pipelines near the best in quicker orders of the same stages, where single actions are moved.

    A listed order may be a tenth slower than what moves make of it, so all within `near_best` of the best plan are
    gone on from, the fastest first; and the fastest of what comes of them a second time, for longer.
    """
    best, tuning = state.incumbents.best, state.tuning
    if best is None or state.paper or state.request.strategy != "exact":
        return
    near = [own for own in state.incumbents.listed() if own[1].time <= tuning.near_best * best.time]
    moved = _moved(state, near[: tuning.moved_orders], tuning.order_move_actions)
    _moved(state, sorted(moved, key=lambda item: rank(item[1]))[: tuning.moved_on], tuning.move_on_actions)


def _moved(state: SearchState, starts: list[tuple[str, Evaluation]], actions: int) -> list[tuple[str, Evaluation]]:
    """Each in the quickest order found, which is added; or as it is."""
    effort, tuning = effort_of(state.request.effort, state.tuning), state.tuning
    found = []
    for family, start in starts:
        best = state.incumbents.best
        spend = MoveEffort(
            actions=effort.share * actions,
            seconds=effort.seconds / len(starts),
            beat=math.inf if best is None else best.time * (1 + state.margin),
        )
        quicker = quicker_order(start, state.hardware, tuning, spend=spend)
        if quicker is not None:
            state.incumbents.add(family, quicker)
        found.append((family, quicker or start))
    return found
