"""What the search has found so far: the best of every family, and which of two is better."""

from __future__ import annotations

from collections.abc import Iterable

from bapipe.planner.evaluate import Candidate, Evaluation

__all__ = ["AS_FAST", "Incumbents", "lightest", "rank"]

AS_FAST = 5e-4
"""share of the throughput by which two plans may differ and count as equally fast: no prediction is closer"""


def rank(evaluation: Evaluation) -> tuple[float, float]:
    """Smaller is better: what fits by throughput, what does not by how much it lacks."""
    short = evaluation.short
    return (0.0 if short is None else short[1], -evaluation.throughput)


def lightest(evaluations: Iterable[Evaluation], *, within: float = AS_FAST) -> Evaluation | None:
    """The fastest that fits; of those as fast, to such a share, the one that needs least memory."""
    fitting = [evaluation for evaluation in evaluations if evaluation.short is None]
    fastest = max((item.throughput for item in fitting), default=0.0)
    level = [item for item in fitting if item.throughput >= fastest * (1 - within)]
    return min(level, key=lambda item: max(item.memory), default=None)


class Incumbents:
    """The best evaluation of each family."""

    def __init__(self) -> None:
        self.by_family: dict[str, Evaluation] = {}
        self.count = 0
        self.bound = 0.0
        """seconds that no candidate of the micro-batch size at hand can beat"""
        self._seen: set[tuple[object, ...]] = set()

    def is_new(self, candidate: Candidate) -> bool:
        """Whether these stages were not yet timed under this schedule; several strategies often agree."""
        schedule = candidate.schedule
        key = (candidate.chain.units, candidate.chain.microbatch, candidate.stages, schedule.name, schedule.caps)
        new = key not in self._seen
        self._seen.add(key)
        return new

    def add(self, family: str, evaluation: Evaluation) -> None:
        self.count += 1
        held = self.by_family.get(family)
        if held is None or rank(evaluation) < rank(held):
            self.by_family[family] = evaluation

    def hopeless(self, family: str) -> bool:
        """Whether the family has done better already than the size at hand allows."""
        held = self.by_family.get(family)
        return held is not None and held.short is None and held.time <= self.bound

    @property
    def best(self) -> Evaluation | None:
        return lightest(self.by_family.values())
