"""What the search has found so far: the best of every family, and which of two is better."""

from __future__ import annotations

from collections.abc import Iterable

from bapipe.planner.candidate import Candidate, StageChoice, takes_moves
from bapipe.planner.evaluate import Evaluation
from bapipe.planner.tuning import DEFAULT_TUNING, Tuning

__all__ = ["Incumbents", "lightest", "rank"]


def rank(evaluation: Evaluation) -> tuple[float, float]:
    """Smaller is better: what fits by throughput, what does not by how much it lacks."""
    short = evaluation.short
    return (0.0 if short is None else short[1], -evaluation.throughput)


def lightest(evaluations: Iterable[Evaluation], *, within: float = DEFAULT_TUNING.as_fast) -> Evaluation | None:
    """The fastest that fits; of those as fast, to such a share, the one that needs least memory."""
    fitting = [evaluation for evaluation in evaluations if evaluation.short is None]
    fastest = max((item.throughput for item in fitting), default=0.0)
    level = [item for item in fitting if item.throughput >= fastest * (1 - within)]
    return min(level, key=lambda item: max(item.memory), default=None)


class Incumbents:
    """The best evaluation of each family, and the candidates near the best of all."""

    def __init__(self, tuning: Tuning = DEFAULT_TUNING, *, margin: float = 0.0) -> None:
        self.by_family: dict[str, Evaluation] = {}
        self.count = 0
        """evaluations that were offered"""
        self._tuning = tuning
        self._margin = margin
        """share of the best time by which a candidate may be slower and is kept; 0: only the best are"""
        self._near: dict[tuple[str, int, int], dict[tuple[StageChoice, ...], tuple[float, Candidate]]] = {}
        """by family, micro-batch size and depth: samples/s and candidate, by stages"""
        self._listed: dict[tuple[str, int, int], Evaluation] = {}
        """the best of each family, micro-batch size and depth whose order was listed for its times"""
        self._seen: set[tuple[object, ...]] = set()

    def is_new(self, candidate: Candidate) -> bool:
        """Whether these stages were not yet timed under this schedule; several strategies often agree."""
        schedule = candidate.schedule
        how = (candidate.copies, candidate.zero, candidate.engine)
        own = (candidate.stages, schedule.name, schedule.caps, schedule.dealing, *how)
        key = (candidate.chain.units, candidate.chain.microbatch, candidate.chain.recompute, *own)
        new = key not in self._seen
        self._seen.add(key)
        return new

    def add(self, family: str, evaluation: Evaluation) -> None:
        """Keep the evaluation if it is the best of its family, and its candidate if it is near the best of all."""
        self.count += 1
        if self._margin and evaluation.short is None:
            self._keep(family, evaluation)
        if evaluation.short is None and takes_moves(evaluation.candidate, most=self._tuning.order_size):
            key = family, evaluation.candidate.chain.microbatch, len(evaluation.candidate.stages)
            if key not in self._listed or rank(evaluation) < rank(self._listed[key]):
                self._listed[key] = evaluation
        held = self.by_family.get(family)
        if held is None or rank(evaluation) < rank(held):
            self.by_family[family] = evaluation

    def listed(self) -> list[tuple[str, Evaluation]]:
        """Families and their best of each micro-batch size and depth whose actions may be moved, fastest first."""
        return sorted(((key[0], own) for key, own in self._listed.items()), key=lambda item: rank(item[1]))

    def _keep(self, family: str, evaluation: Evaluation) -> None:
        """Only the few fastest of each family, micro-batch size and depth: timelines of all would fill memory."""
        candidate, rate = evaluation.candidate, evaluation.throughput
        own = self._near.setdefault((family, candidate.chain.microbatch, len(candidate.stages)), {})
        if candidate.stages not in own or own[candidate.stages][0] < rate:
            own[candidate.stages] = rate, candidate
        if len(own) > self._tuning.kept_cuts:
            del own[min(own, key=lambda stages: own[stages][0])]

    @property
    def near(self) -> list[Candidate]:
        """Candidates that fit and are near the best, from the fastest on; none where no margin is set."""
        kept = sorted((item for own in self._near.values() for item in own.values()), key=lambda item: -item[0])
        enough = kept[0][0] / (1 + self._margin) if kept else 0.0
        return [candidate for rate, candidate in kept if rate >= enough][: self._tuning.scenario_candidates]

    def beats(self, family: str, bound: float) -> bool:
        """Whether the family's best fits and takes no longer than so many seconds."""
        held = self.by_family.get(family)
        return held is not None and held.short is None and held.time <= bound

    def ranked(self) -> list[Evaluation]:
        """The best of every family, from the best on; those that do not fit are last."""
        return sorted(self.by_family.values(), key=rank)

    @property
    def lack_memory(self) -> bool:
        """Whether anything that is faster than all that fits lacks memory."""
        best = self.best
        lacking = (own for own in self.by_family.values() if own.short is not None)
        return any(best is None or own.throughput > best.throughput for own in lacking)

    def best_of(self, schedule: str) -> Evaluation | None:
        """The fastest that fits under one schedule: what a search for that schedule alone knows as its best."""
        own = (item for item in self.by_family.values() if item.candidate.schedule.name == schedule)
        return lightest(own, within=self._tuning.as_fast)

    @property
    def best(self) -> Evaluation | None:
        """The fastest that fits; of those as fast, the one that needs least memory."""
        return lightest(self.by_family.values(), within=self._tuning.as_fast)
