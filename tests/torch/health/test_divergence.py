"""When gradients that have grown are said to diverge."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from bapipe.torch.health.divergence import EVERY, DivergenceMonitor, Diverging


def reports(norms: Sequence[float]) -> list[int]:
    """Places of the norms at which something is reported."""
    monitor = DivergenceMonitor()
    return [place for place, norm in enumerate(norms) if monitor.observe(norm) is not None]


def test_two_large_norms_in_a_row_are_reported_and_one_is_not() -> None:
    usual = [3.1, 2.8, 2.9, 2.7, 2.9]
    assert reports([*usual, 61.0, 480.0]) == [6]
    assert reports([*usual, 61.0, 2.8, 70.0, 2.9]) == []
    assert reports([*usual, 9.0, 12.0, 20.0]) == []


def test_a_huge_norm_is_reported_at_once() -> None:
    assert reports([3.0, 3.0, 3.0, 3.0, 4000.0]) == [4]


def test_the_first_norms_and_those_that_are_not_finite_are_not_judged() -> None:
    """Gradients may be 0 at first, as those behind a weight that begins at 0 are."""
    assert reports([0.0, 0.0, 1e-9, 1.0, 5.0, 4.0]) == []
    assert reports([3.0, 3.0, 3.0, 3.0, math.inf, math.nan, 3.0]) == []


def test_norms_that_shrink_or_grow_slowly_are_usual() -> None:
    assert reports([100 * 0.7**place for place in range(60)]) == []
    assert reports([1.2**place for place in range(60)]) == []


def test_it_is_reported_again_only_after_many_looks() -> None:
    norms = [3.0] * 4 + [300.0] * 40
    found = reports(norms)
    assert found[0] == 5
    assert all(after - before >= 12 for before, after in itertools.pairwise(found))
    assert len(found) > 1


def test_every_eighth_step_is_due() -> None:
    monitor = DivergenceMonitor()
    assert [step for step in range(20) if monitor.is_due(step)] == [EVERY - 1, 2 * EVERY - 1]


def test_the_line_names_the_layer() -> None:
    found = Diverging(step=55, norm=480.0, usual=2.9, rank=1, stage=1, layer="blocks.3", share=0.58)
    assert found.line == (
        "step 55: the gradients diverge: their norm is 480, 166 times what it was; layer 'blocks.3' on rank 1, "
        "stage 1, has 58 % of it; lower the learning rate, or clip gradients"
    )
