"""Branch and bound over thresholds, around the programmes that find the least fill under them.

T = Φ + B + Ω. For thresholds (b, ω), the least Φ of any plan with B ≤ b and Ω ≤ ω gives a lower bound Φ + b' + ω'
on every plan with b' ≤ B ≤ b and ω' ≤ Ω ≤ ω. Boxes of thresholds are bisected, the most promising first, until the
best plan found is no worse than every box left.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.partition.exact.dual import ROUNDING, raise_bound
from bapipe.planner.partition.exact.fill import FillResult, exact
from bapipe.planner.partition.exact.problem_tables import Tables
from bapipe.planner.partition.exact.windows import bound, bracket

__all__ = ["MAX_TABLE", "SearchOutcome", "least_steady", "least_time"]

MAX_TABLE = 100_000_000
"""states of one programme, 8 bytes each; thresholds that need more are not tried"""

_COARSEST = 1e-3
"""share of T below which a box that cannot be resolved is no longer cut"""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOutcome:
    """The best plan found and what is known of better ones."""

    best: FillResult | None
    """None: there is no plan, or the guard ended the search before one was found"""
    lower_bound: float
    """no plan takes less time, up to rounding; inf if there is none"""
    proved: bool
    """whether no plan is better, up to rounding"""
    states: int
    """visited in all programmes"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Box:
    """Plans with B and Ω in given ranges."""

    steady_low: float
    steady_high: float
    update_low: float
    update_high: float
    fill: float
    """no plan in the box has a smaller Φ"""
    charges: Floats
    """that raised the bound of the box this one is part of"""

    @property
    def bound(self) -> float:
        """No plan in the box has a smaller T."""
        return self.fill + self.steady_low + self.update_low

    def __lt__(self, other: _Box) -> bool:
        return self.bound < other.bound

    def within(self, best: float) -> _Box:
        """Leave out what Φ rules out, given that less than `best` is wanted."""
        spare = best - self.fill
        return replace(
            self,
            steady_high=min(self.steady_high, spare - self.update_low),
            update_high=min(self.update_high, spare - self.steady_low),
        )

    def without(self, found: FillResult, margin: float) -> list[_Box]:
        """Cut into parts that hold all plans but `found`, of least Φ here, and those no better by 2 · margin.

        A better plan must have a smaller B or a smaller Ω. Parts that stay nearly as long as this box are halved.
        """
        parts = [
            replace(self, steady_high=min(self.steady_high, found.steady - margin)),
            replace(
                self,
                steady_low=max(self.steady_low, found.steady - margin),
                update_high=min(self.update_high, found.update - margin),
            ),
        ]
        result: list[_Box] = []
        for part in parts:
            if part.steady_high >= part.steady_low and part.update_high >= part.update_low:
                result.extend(part.halves() if part.length > 0.75 * self.length else [part])
        return result

    @property
    def length(self) -> float:
        """The longer side."""
        return max(self.steady_high - self.steady_low, self.update_high - self.update_low)

    def halves(self) -> tuple[_Box, _Box]:
        """Cut across the longer side."""
        middle = (self.steady_low + self.steady_high) / 2
        if self.steady_high - self.steady_low >= self.update_high - self.update_low:
            return replace(self, steady_high=middle), replace(self, steady_low=middle)
        middle = (self.update_low + self.update_high) / 2
        return replace(self, update_high=middle), replace(self, update_low=middle)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Least:
    """The least Φ under thresholds."""

    found: FillResult | None
    """a plan within the thresholds"""
    fill: float
    """no plan within them has a smaller Φ; inf if there is none"""
    resolved: bool
    """whether `fill` is that of `found` or at least the cutoff; False if the search was too large"""
    charges: Floats
    states: int


def least_time(tables: Tables, *, max_states: int) -> SearchOutcome:
    """Return the plan of least T. Cost: as a rule 10 to 100 times `raise_bound`, few of them with `exact`.

    Where a part of the search needs more than max_states in all, or MAX_TABLE at once, it is left out and its
    bound returned as the lower bound.
    """
    steady_low, steady_first = bracket(tables, of="steady")
    update_low, _ = bracket(tables, of="update")
    first = _first_plan(tables, steady_first, max_states=max_states)
    best, states = first.found, first.states
    if best is None:
        return SearchOutcome(best=None, lower_bound=first.fill, proved=first.resolved, states=states)
    box = _Box(
        steady_low=steady_low,
        steady_high=tables.most_steady,
        update_low=update_low,
        update_high=tables.most_update,
        fill=tables.least_fill,
        charges=first.charges,
    )
    heap, left_out = [box], math.inf
    while heap and heap[0].bound < best.time * (1 - ROUNDING):
        if states >= max_states:
            left_out = min(left_out, heap[0].bound)
            break
        box = heapq.heappop(heap).within(best.time * (1 - ROUNDING))
        least = _least_fill(
            tables,
            steady=box.steady_high,
            update=box.update_high,
            charges=box.charges,
            cutoff=best.time - box.steady_low - box.update_low,
            max_states=max_states - states,
        )
        states += least.states
        if least.found is not None and least.found.time < best.time:
            best = least.found
        box = replace(box, fill=max(box.fill, least.fill), charges=least.charges)
        box = box.within(best.time * (1 - ROUNDING))
        if not least.resolved and box.bound + _COARSEST * best.time > box.fill + box.steady_high + box.update_high:
            left_out = min(left_out, box.bound)
            continue
        parts = list(box.halves())
        if least.found is not None and least.resolved:
            parts = box.without(least.found, ROUNDING / 4 * best.time)
        for part in parts:
            if part.bound < best.time * (1 - ROUNDING):
                heapq.heappush(heap, part)
    lowest = min(left_out, best.time)
    return SearchOutcome(best=best, lower_bound=lowest, proved=lowest >= best.time * (1 - ROUNDING), states=states)


def least_steady(tables: Tables, *, max_states: int) -> SearchOutcome:
    """Return the plan of least B and, among those, of least Φ. Cost: as a rule 20 to 60 times `raise_bound`."""
    low, high = bracket(tables, of="steady")
    least = _first_plan(tables, high, max_states=max_states)
    best, states, proved = least.found, least.states, least.resolved
    if best is None:
        return SearchOutcome(best=None, lower_bound=least.fill, proved=proved, states=states)
    floor = low
    while best.steady - low > ROUNDING * best.steady:
        middle = low + (best.steady - low) / 2
        left = max_states - states
        least = _least_fill(tables, steady=middle, charges=least.charges, max_states=left)
        states += least.states
        if least.found is None:
            low = middle
            proved = proved and least.resolved
            floor = low if proved else floor
        else:
            best = least.found
    last = _least_fill(
        tables,
        steady=best.steady,
        charges=least.charges,
        cutoff=best.fill * (1 + ROUNDING),
        max_states=max_states - states,
    )
    if last.found is not None and last.found.fill < best.fill:
        best = last.found
    lowest = min(tables.least_fill + (best.steady if proved else floor), best.time)
    return SearchOutcome(best=best, lower_bound=lowest, proved=proved, states=states + last.states)


def _first_plan(tables: Tables, steady: float, *, max_states: int) -> _Least:
    """Return a plan with B near `steady`, which the relaxation allows. The bound is inf if there is no plan."""
    charges = np.zeros(len(tables.counts))
    least = _Least(found=None, fill=math.inf, resolved=True, charges=charges, states=0)
    if steady == math.inf:
        return least
    states = 0
    for factor in (1.0, 1.02, 1.1, 1.5, 3.0, math.inf):
        limit = tables.most_steady if factor == math.inf else min(steady * factor, tables.most_steady)
        least = _least_fill(tables, steady=limit, charges=least.charges, max_states=max_states - states)
        states += least.states
        if least.found is not None:
            break
    return replace(least, states=states)


def _least_fill(
    tables: Tables,
    *,
    steady: float,
    charges: Floats,
    max_states: int,
    update: float = math.inf,
    cutoff: float = math.inf,
) -> _Least:
    """Return the least Φ of plans with B ≤ steady and Ω ≤ update, so far as it is under the cutoff."""
    area = bound(tables, steady=steady, update=update)
    if area.states == 0:
        return _Least(found=None, fill=math.inf, resolved=True, charges=charges, states=0)
    if area.states > min(MAX_TABLE, max_states):
        return _Least(found=None, fill=0.0, resolved=False, charges=charges, states=0)
    raised = raise_bound(tables, area, charges=charges, target=cutoff)
    charges, found, fill = raised.best.charges, raised.found, raised.best.bound
    states = raised.rounds * area.states
    if raised.optimal or fill >= cutoff or tables.fine is None:
        resolved = raised.optimal or fill >= cutoff
        return _Least(found=found, fill=fill, resolved=resolved, charges=charges, states=states)
    limit = cutoff if found is None else min(cutoff, found.fill)
    better, visited = exact(
        tables, area, raised.best, cutoff=limit, max_states=min(MAX_TABLE, max_states - states)
    )
    if visited < 0:
        return _Least(found=found, fill=fill, resolved=False, charges=charges, states=states)
    if better is not None and (found is None or better.fill < found.fill):
        found = better
    fill = limit if better is None else min(limit, better.fill)
    return _Least(found=found, fill=fill, resolved=True, charges=charges, states=states + visited)
