"""Memory fine-tuning (the paper's last step): move layers out of stages that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bapipe.planner.partition.paper.stage_cuts import Cuts, hill_climb

__all__ = ["fit_memory"]


def fit_memory(
    cuts: Cuts,
    memory: Callable[[Cuts], Sequence[float]],
    capacity: Sequence[float],
    times: Callable[[Cuts], Sequence[float]],
    allowed: Sequence[bool] | None = None,
) -> tuple[Cuts, float]:
    """Move cuts until no stage needs more than its capacity, at the least cost in balance.

    Returns the cuts and the bytes still lacking in all (0: it fits). First the shortage is driven down, then among
    partitions with no more shortage, the longest stage.
    """

    def lacking(trial: Cuts) -> list[float]:
        return [need - have if need > have else 0.0 for need, have in zip(memory(trial), capacity, strict=True)]

    def shortage(trial: Cuts) -> float:
        return sum(lacking(trial))

    if shortage(cuts) == 0:
        return cuts, 0.0

    def score(trial: Cuts) -> tuple[float, ...]:
        each = lacking(trial)
        return (sum(each), *sorted(each, reverse=True), *sorted(times(trial), reverse=True))

    tuned = hill_climb(cuts, score, allowed, first=shortage)
    return tuned, shortage(tuned)
