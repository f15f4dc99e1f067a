"""Which size to try next, so that the largest that trains is found by few tries."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["following"]

_STEP = 0.03
"""of the first size: how exactly the largest one is looked for"""


def following(first: int, outcomes: Mapping[int, str]) -> int | None:
    """The next even size after these outcomes, which are "trained", "out of memory" or "error".

    `first`, up while it trains, down by growing steps while it does not fit, then between the two. None: it is
    known to a step, or there was an error, which says nothing about sizes.
    """
    if not outcomes:
        return first
    step = max(2, round(_STEP * first / 2) * 2)
    trained = [layers for layers, outcome in outcomes.items() if outcome == "trained"]
    failed = [layers for layers, outcome in outcomes.items() if outcome == "out of memory"]
    if len(trained) + len(failed) < len(outcomes):
        return None
    if not failed:
        return max(trained) + step
    if not trained:
        lower = min(failed) - step * 2 ** (len(failed) - 1)
        return lower if lower >= 8 else None
    low, high = max(trained), min(failed)
    middle = (low + high) // 4 * 2
    return middle if high - low > step and low < middle < high else None
