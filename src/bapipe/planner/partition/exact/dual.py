"""Charges for accelerators that raise the relaxed bound: a cutting-plane method in as many dimensions as types.

Charging λ_t for each accelerator of type t and giving λ·counts back bounds the least Φ from below for every λ ≥ 0
(any λ if all accelerators must be used). The bound is concave in λ and each relaxed plan is a plane above it: the
next λ is where the lowest plane is highest, near the best λ so far. Where the best bound meets a plan that keeps
the counts, that plan is optimal and no search over the counts is needed; as a rule it does.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.partition.exact.fill import FillResult, Relaxed, relaxed
from bapipe.planner.partition.exact.problem_tables import Tables
from bapipe.planner.partition.exact.windows import Windows

__all__ = ["ROUNDING", "Raised", "raise_bound"]

ROUNDING = 1e-12
"""share by which sums may differ and still count as equal"""
_ROUNDS = 40
_ZOOMS = 10

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Raised:
    """The best bound found, and the best plan met on the way."""

    best: Relaxed
    found: FillResult | None
    """of least Φ among the relaxed plans that respect the counts"""
    optimal: bool
    """whether `found` has the least Φ within the thresholds, or there is no plan"""
    rounds: int
    """relaxed programmes run"""


def raise_bound(tables: Tables, area: Windows, *, charges: Floats, target: float) -> Raised:
    """Raise the bound on Φ within the thresholds, from `charges` on, until it is tight or reaches `target`.

    Cost: one relaxed programme if the coarse net is exact, else 1 to 40, 5 as a rule with charges from similar
    thresholds.
    """
    first = charges
    best = relaxed(tables, area, charges=charges)
    found = best.found
    heights, slopes = [], []
    radius = max(abs(best.bound) / max(1, int(tables.counts.sum())), float(np.max(np.abs(charges)))) / 4
    latest = best
    for rounds in range(1, _ROUNDS + 1):
        if best.bound == np.inf or tables.coarse_exact:
            return Raised(best=best, found=found, optimal=True, rounds=rounds)
        if found is not None and found.fill - best.bound <= ROUNDING * abs(found.fill):
            return Raised(best=best, found=found, optimal=True, rounds=rounds)
        if best.bound > tables.most_fill * (1 + 1e-9):
            # The bound has no limit: no plan respects the counts.
            none = replace(best, bound=np.inf, charges=first)
            return Raised(best=none, found=None, optimal=True, rounds=rounds)
        if best.bound >= target:
            break
        heights.append(latest.bound - float(latest.charges @ latest.excess))
        slopes.append(latest.excess)
        height, charges = _highest(
            np.array(heights), np.array(slopes, float), best.charges, radius, signed=tables.use_all
        )
        if height - best.bound <= ROUNDING * abs(height):
            break
        latest = relaxed(tables, area, charges=charges)
        if latest.found is not None and (found is None or latest.found.fill < found.fill):
            found = latest.found
        if latest.bound > best.bound:
            best = latest
            radius *= 1.5
        else:
            radius *= 0.6
    return Raised(best=best, found=found, optimal=False, rounds=rounds)


def _highest(
    heights: Floats, slopes: Floats, centre: Floats, radius: float, *, signed: bool
) -> tuple[float, Floats]:
    """Return about the highest point of the lowest of planes height + slope·λ in a box, and where it is.

    Grids of ever smaller size, each around the best point so far: a few planes in two or three dimensions do not
    need more, and any point is allowed.
    """
    grid = _grid(len(centre))
    best, at = -np.inf, centre
    for _ in range(_ZOOMS):
        points = at + radius * grid
        if not signed:
            points = np.maximum(points, 0.0)
        values = (heights[:, None] + slopes @ points.T).min(axis=0)
        index = int(values.argmax())
        if values[index] > best:
            best, at = float(values[index]), points[index]
        radius *= 0.6
    return best, at


@functools.cache
def _grid(dimensions: int) -> Floats:
    steps = np.linspace(-1.0, 1.0, 5 if dimensions <= 3 else 3)
    return np.array(list(itertools.product(steps, repeat=dimensions)))
