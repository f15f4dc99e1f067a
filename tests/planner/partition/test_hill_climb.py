"""Moving cuts one at a time: the short cuts of the search change nothing that it finds."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from bapipe.planner.partition.paper.stage_cuts import Cuts, hill_climb, starts


def plain_climb(cuts: Cuts, score: Callable[[Cuts], tuple[float, ...]], places: list[int]) -> Cuts:
    """The same climb with neighbours looked for one by one."""
    best, improved = cuts, True
    while improved:
        improved = False
        for index in range(len(best) - 1):
            low = best[index - 1] if index else -1
            below = [place for place in places if low < place < best[index]]
            above = [place for place in places if best[index] < place < best[index + 1]]
            for moved in (*below[-1:], *above[:1]):
                trial = (*best[:index], moved, *best[index + 1 :])
                if score(trial) < score(best):
                    best, improved = trial, True
    return best


@pytest.mark.parametrize("seed", range(40))
def test_short_cuts_lead_to_the_same_place(seed: int) -> None:
    draw = random.Random(seed)
    units, stages = draw.randint(4, 24), draw.randint(2, 4)
    cost = [draw.choice([0.0, 1.0, 1.0, 3.0]) for _ in range(units)]
    room = sum(cost) / stages
    allowed = [draw.random() < 0.8 for _ in range(units - 1)]
    places = [place for place in range(units - 1) if allowed[place]]
    cuts = (*sorted(draw.sample(range(units - 1), stages - 1)), units - 1)

    def sizes(trial: Cuts) -> list[float]:
        return [sum(cost[first : last + 1]) for first, last in zip(starts(trial), trial, strict=True)]

    def lacking(trial: Cuts) -> float:
        return sum(max(0.0, size - room) for size in sizes(trial))

    def score(trial: Cuts) -> tuple[float, ...]:
        return (lacking(trial), *sorted(sizes(trial), reverse=True))

    expected = plain_climb(cuts, score, places)
    assert hill_climb(cuts, score, allowed) == expected
    assert hill_climb(cuts, score, allowed, first=lacking) == expected
    assert score(expected) <= score(cuts)
