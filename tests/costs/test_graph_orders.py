"""The row of a branched graph: the one from which a pipeline is cut best, found by looking at every cut."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from bapipe.costs.graph_orders import MOST_CUTS, best_row

DIAMOND = {"a": ["b", "d"], "b": ["c"], "c": ["e"], "d": ["e"], "e": []}
"""a -> b -> c -> e and a -> d -> e"""


def bottleneck(
    row: list[str], after: dict[str, list[str]], work: dict[str, float], sizes: dict[str, float], stages: int
) -> float:
    """Of the best of all cuts of the row into up to so many stages, at 1 byte/s."""
    best = math.inf
    for depth in range(1, stages + 1):
        for ends in itertools.combinations(range(1, len(row)), depth - 1):
            parts = [row[low:high] for low, high in itertools.pairwise([0, *ends, len(row)])]
            crossing = [
                sum(sizes[name] for name in row[:end] if any(target in row[end:] for target in after[name]))
                for end in ends
            ]
            best = min(best, max([*(sum(work[name] for name in part) for part in parts), *crossing]))
    return best


def rows(after: dict[str, list[str]]) -> list[list[str]]:
    """Every topological order."""
    return [
        list(order)
        for order in itertools.permutations(after)
        if all(order.index(name) < order.index(target) for name in after for target in after[name])
    ]


@pytest.mark.parametrize("seed", range(30))
def test_no_other_row_can_be_cut_better(seed: int) -> None:
    rng = np.random.default_rng(seed)
    names = [f"n{index}" for index in range(7)]
    after = {
        name: [other for other in names[place + 1 :] if rng.random() < 0.35] for place, name in enumerate(names)
    }
    work = dict(zip(names, rng.integers(0, 9, 7).astype(float).tolist(), strict=True))
    sizes = dict(zip(names, rng.integers(0, 6, 7).astype(float).tolist(), strict=True))
    row = best_row(names, after, work=work, sizes=sizes, stages=3, bandwidth=1.0)
    assert row in rows(after)
    best = min(bottleneck(own, after, work, sizes, 3) for own in rows(after))
    assert bottleneck(row, after, work, sizes, 3) <= best * (1 + 1e-3) + 1e-12


def test_a_branch_goes_where_stages_become_even() -> None:
    work = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 2.0, "e": 1.0}
    sizes = dict.fromkeys(DIAMOND, 0.0)
    row = best_row("abcde", DIAMOND, work=work, sizes=sizes, stages=2, bandwidth=1.0)
    assert bottleneck(row, DIAMOND, work, sizes, 2) == 5.0
    assert bottleneck(list("abcde"), DIAMOND, work, sizes, 2) == 6.0
    assert best_row("abcde", DIAMOND, work=work, sizes=sizes, stages=1, bandwidth=1.0) == list("abcde")


def test_a_graph_with_too_many_cuts_keeps_its_row() -> None:
    names = [f"n{index}" for index in range(MOST_CUTS.bit_length() + 1)]
    free = {name: list[str]() for name in names}
    assert best_row(
        names, free, work=dict.fromkeys(names, 1.0), sizes=dict.fromkeys(names, 1.0), stages=2, bandwidth=1.0
    ) == names  # fmt: skip
