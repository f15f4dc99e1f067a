"""The least fill Φ under thresholds on the steady term and the optimizer step, by two programmes under them.

`relaxed` finds the least Φ when stages may take accelerators of any type at a charge per type (a Lagrangian bound,
exact for one type or a chain); `exact`, dearer, runs over the numbers used of each type, in what that bound leaves
over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.partition.exact.dynamic_programme import Pruning, fill_arrays, fill_loops, shrink, to_go, trace
from bapipe.planner.partition.exact.kernels import Area, Net
from bapipe.planner.partition.exact.problem import Choice
from bapipe.planner.partition.exact.problem_tables import Tables
from bapipe.planner.partition.exact.windows import Windows, area_of

__all__ = ["FillResult", "Relaxed", "choices", "exact", "relaxed"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class FillResult:
    """A plan with the least Φ under some thresholds."""

    path: tuple[tuple[int, int], ...]
    """(time key, first layer) of every stage"""
    fill: float
    """Φ"""
    steady: float
    """B"""
    update: float
    """Ω"""

    @property
    def time(self) -> float:
        """T."""
        return self.fill + self.steady + self.update


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Relaxed:
    """The least Φ under thresholds when accelerators of each type are charged for, not counted."""

    bound: float
    """no plan within the thresholds has a smaller Φ; inf if there is none"""
    excess: NDArray[np.int64]
    """[type] accelerators the relaxed plan uses beyond those there are"""
    found: FillResult | None
    """the relaxed plan, if it is a plan"""
    charges: Floats
    """[type] seconds per accelerator"""
    value: Any
    """[coarse state] least Φ and charges of the suffix"""


def relaxed(tables: Tables, area: Windows, *, charges: Floats) -> Relaxed:
    """Return the least Φ under the thresholds with a charge per accelerator of each type and no count of them.

    Cost: O(area.states · types · replicas · log of a stage's layers), times a stage's layers instead of their
    logarithm if communication is exposed.
    """
    types, replicas, _ = tables.keys.time.T
    value = np.full(area.states, math.inf)
    charge = tables.backend.hold(charges[types] * replicas)
    traced = None
    if area.states:
        idle = tables.backend.full(0, 0.0)
        pruning = Pruning(
            active=False, coarse=tables.coarse.start, area=area.coarse, rest=idle, credit=idle, cutoff=math.inf
        )
        _fill(tables, tables.coarse, area, area.coarse, charge, value, pruning)
        traced = _trace(tables, tables.coarse, area, area.coarse, charge, value)
    excess = np.zeros(len(charges), np.int64)
    if traced is None:
        return Relaxed(bound=math.inf, excess=excess, found=None, charges=charges, value=value)
    charged, plan = traced
    if tables.coarse_exact:
        return Relaxed(bound=charged, excess=excess, found=plan, charges=charges, value=value)
    path = [key for key, _ in plan.path]
    used = np.bincount(types[path], weights=replicas[path], minlength=len(charges)).astype(np.int64)
    excess = used - tables.counts
    fits = not excess.any() if tables.use_all else bool((excess <= 0).all())
    return Relaxed(
        bound=charged - float(charges @ tables.counts),
        excess=excess,
        found=plan if fits else None,
        charges=charges,
        value=value,
    )


def exact(
    tables: Tables, area: Windows, start: Relaxed, *, cutoff: float, max_states: int
) -> tuple[FillResult | None, int]:
    """Return the plan of least Φ among those within the thresholds with Φ ≤ cutoff, None if there is none.

    `start` is a relaxation under the same thresholds: the closer its bound to the least Φ, and that to the cutoff,
    the fewer states are visited; how many is the second result, and it is −1, with None, if they would exceed
    max_states. Cost per state as in `relaxed`. Needs tables.fine.
    """
    assert tables.fine is not None
    backend, width, fine = tables.backend, tables.width, tables.fine
    types, replicas, _ = tables.keys.time.T
    part, states = area_of(tables, fine.net, area.limits)
    if states == 0:
        return None, 0
    rest = backend.full(area.states, math.inf)
    charge = backend.hold(start.charges[types] * replicas)
    room = (backend.full(width, 0), backend.full(width, 0.0))
    context = (tables.costs, tables.memory, area.limits, area.coarse)
    backend.call(to_go, width, tables.coarse, *context, charge, rest, *room)
    slack = cutoff + 1e-9 * abs(cutoff)
    edges = (backend.full(len(tables.coarse.source), 0), backend.full(len(tables.coarse.source), 0))
    most = slack + float(start.charges @ tables.counts)
    states = int(backend.call(shrink, fine.coarse, area.coarse, start.value, rest, most, *edges, part))
    if states > max_states:
        return None, -1
    value = np.full(states, math.inf)
    free = backend.hold(np.zeros(len(types)))
    credit = backend.hold(start.charges @ (tables.counts[:, None] - fine.counts))
    pruning = Pruning(active=True, coarse=fine.coarse, area=area.coarse, rest=rest, credit=credit, cutoff=slack)
    _fill(tables, fine.net, area, part, free, value, pruning)
    traced = _trace(tables, fine.net, area, part, free, value)
    return None if traced is None else traced[1], states


def _under(tables: Tables, net: Net, area: Windows, part: Area, charge: Any, value: Floats) -> tuple[Any, ...]:
    """What the programme's kernels take first: a net under thresholds, and values with charges."""
    known = (tables.width, net, tables.costs, tables.memory)
    return (*known, area.limits, part, area.steady, tables.exposed, charge, value)


def _fill(
    tables: Tables, net: Net, area: Windows, part: Area, charge: Any, value: Floats, pruning: Pruning
) -> None:
    full, width = tables.backend.full, tables.width
    compiled = tables.backend.compiled
    tables.backend.call(
        fill_loops if compiled else fill_arrays,
        *_under(tables, net, area, part, charge, value),
        tables.log,
        full(width * width.bit_length() if compiled else 0, 0.0),
        full(width if compiled else 0, 0),
        pruning,
    )


def _trace(
    tables: Tables, net: Net, area: Windows, part: Area, charge: Any, value: Floats
) -> tuple[float, FillResult] | None:
    """Return the least value with charges, and the plan that has it."""
    full, stages = tables.backend.full, tables.width - 1
    path_key, path_start, reached = full(stages, 0), full(stages, 0), full(4, 0.0)
    under = _under(tables, net, area, part, charge, value)
    count = tables.backend.call(trace, *under, path_key, path_start, reached)
    if count == 0:
        return None
    found = FillResult(
        path=tuple((int(path_key[stage]), int(path_start[stage])) for stage in range(count)),
        fill=float(reached[3]),
        steady=float(reached[1]),
        update=float(reached[2]),
    )
    return float(reached[0]), found


def choices(tables: Tables, found: FillResult) -> list[Choice]:
    """Return the stages of a plan, first one first."""
    stops = [start for _, start in found.path[1:]] + [tables.width - 1]
    result = []
    for (key, start), stop in zip(found.path, stops, strict=True):
        type_, replicas, again = tables.keys.time[key].tolist()
        result.append(
            Choice(first_layer=start, last_layer=stop - 1, type=type_, replicas=replicas, recompute=bool(again))
        )
    return result
