"""What the candidates take in the scenarios, and which of them to run where no prediction is exact."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from bapipe.costs.segments import Floats
from bapipe.planner.candidate import Candidate, unreplicated
from bapipe.planner.evaluate import Evaluation
from bapipe.planner.scenarios import Errors

__all__ = ["Outlook", "complexity", "least_regret"]

_LOW, _HIGH = 5, 95
"""percentiles of the scenarios that a prediction gives as its range"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outlook:
    """Candidates in common scenarios."""

    evaluations: tuple[Evaluation, ...]
    """the chosen one first"""
    times: Floats
    """[evaluation, scenario] seconds of a global batch"""
    errors: Errors
    """what the scenarios were drawn with"""

    def range(self, evaluation: Evaluation) -> tuple[float, float] | None:
        """5th and 95th percentile of its time; None: it was not timed in the scenarios."""
        index = self._index(evaluation)
        if index is None:
            return None
        low, high = np.percentile(self.times[index], [_LOW, _HIGH])
        return float(low) + evaluation.overhead, float(high) + evaluation.overhead

    def within_error(self, evaluation: Evaluation, other: Evaluation) -> bool:
        """Whether it may well be as fast as the other: it is in 5 % of the scenarios or more."""
        one, two = self._index(evaluation), self._index(other)
        if one is None or two is None:
            return False
        relative = self._per_sample()
        return bool(100 * np.mean(relative[one] <= relative[two]) >= _LOW)

    def race(self, limit: int, *, worth: float) -> list[Evaluation]:
        """The chosen one, then what most lowers the mean over scenarios of the fastest time, at most so many.

        Stops where the next would lower it by less than such a share.
        """
        relative = self._per_sample()
        relative = relative / relative.min(axis=0)
        taken = [0, *_lowering(relative, relative[0], limit - 1, worth=worth)]
        return [self.evaluations[index] for index in taken]

    def improving(
        self, limit: int, *, beat: float, worth: float, known: Collection[Evaluation] = ()
    ) -> list[Evaluation]:
        """What most lowers the mean over scenarios of the fastest time, at most so many, none of the known ones.

        A plan of `beat` seconds per sample has been run, so that its time is the same in all of them. One that is
        predicted to be as fast, with an error, is faster in half of the scenarios: that counts.
        """
        overheads = np.array([[own.overhead / own.samples] for own in self.evaluations])
        relative = (self._per_sample() + overheads) / beat
        relative[[index for index, own in enumerate(self.evaluations) if own in known]] = np.inf
        taken = _lowering(relative, np.ones(relative.shape[1]), limit, worth=worth)
        return [self.evaluations[index] for index in taken]

    def _index(self, evaluation: Evaluation) -> int | None:
        found = (index for index, own in enumerate(self.evaluations) if own is evaluation)
        return next(found, None)

    def _per_sample(self) -> Floats:
        return _per_sample(self.evaluations, self.times)


def _lowering(relative: Floats, fastest: Floats, limit: int, *, worth: float) -> list[int]:
    """The candidates that, one after the other, most lower the mean of the fastest, each by so much at least."""
    taken: list[int] = []
    while len(taken) < limit:
        after = np.minimum(fastest, relative).mean(axis=1)
        nearest = int(after.argmin())
        if nearest in taken or after[nearest] > fastest.mean() - worth:
            break
        taken.append(nearest)
        fastest = np.minimum(fastest, relative[nearest])
    return taken


def _per_sample(evaluations: Sequence[Evaluation], times: Floats) -> Floats:
    """In the space of the paper candidates train global batches of different sizes."""
    return np.asarray(times / np.array([[own.samples] for own in evaluations]), dtype=np.float64)


def complexity(candidate: Candidate) -> tuple[int, int]:
    """Smaller is simpler: first what the ranks depend on in each other, then the number of stages.

    0 data parallelism, 1f1b and gpipe; 1 zb, whose order is made for its times; 2 interleaved, where each rank
    waits for others several times per micro-batch; 3 hybrids, which also sum gradients; 4 split layers.
    """
    stages, units = candidate.stages, candidate.chain.units
    if any(units[stage.last].stop < units[stage.last].of for stage in stages):
        kind = 4
    elif len(stages) > 1 and not unreplicated(stages):
        kind = 3
    elif candidate.schedule.num_ranks < len(stages):
        kind = 2
    else:
        kind = int(candidate.schedule.name.startswith("zb"))
    return kind, len(stages)


def least_regret(evaluations: Sequence[Evaluation], times: Floats, *, tolerance: float) -> int:
    """The one whose time is, in the mean over scenarios, least over the fastest in the scenario.

    Of those within such a share of it, the simplest (`complexity`), and of these the one of least regret.
    """
    relative = _per_sample(evaluations, times)
    regret = (relative / relative.min(axis=0)).mean(axis=1) - 1
    level = np.flatnonzero(regret <= regret.min() + tolerance).tolist()
    return min(level, key=lambda index: (complexity(evaluations[index].candidate), regret[index]))
