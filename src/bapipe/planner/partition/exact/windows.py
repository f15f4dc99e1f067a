"""What thresholds on the steady term and the optimizer step leave of the states: the cheapest programme."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from bapipe.planner.partition.exact.kernels import Area, Limits, Net, limit_times, narrow, windows
from bapipe.planner.partition.exact.problem_tables import Tables

__all__ = ["Windows", "area_of", "bound", "bracket", "feasible"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Windows:
    """What one pair of thresholds leaves of the states."""

    steady: float
    update: float
    limits: Limits
    coarse: Area
    states: int
    """0: no plan keeps the thresholds"""


def bound(tables: Tables, *, steady: float, update: float) -> Windows:
    """Return the coarse states that plans with B ≤ steady and Ω ≤ update may use, and perhaps more.

    Cost: O(time keys · L + coarse options). No states means that there is certainly no such plan.
    """
    backend, width = tables.backend, tables.width
    keys = len(tables.costs.row) * width
    limits = Limits(*(backend.positions(size) for size in (keys, keys, width, width, width)))
    backend.call(limit_times, width, steady, update, tables.costs, limits)
    area, states = area_of(tables, tables.coarse, limits)
    return Windows(steady=steady, update=update, limits=limits, coarse=area, states=states)


def bracket(tables: Tables, *, of: Literal["steady", "update"]) -> tuple[float, float]:
    """Return (a, b) such that no plan has a B (or Ω) under a and `feasible` allows b, b − a ≤ 10⁻⁶ b.

    Twice inf if there is no plan at all. Cost: about 20 times `feasible`.
    """
    backend, width = tables.backend, tables.width
    keys = len(tables.costs.row) * width
    limits = Limits(*(backend.positions(size) for size in (keys, keys, width, width, width)))
    finer = tables.fine is not None
    nets = tables.coarse, tables.coarse if tables.fine is None else tables.fine.net
    area, fine_area = (Area(*(backend.full(len(net.source), 0) for _ in range(3))) for net in nets)
    most = tables.most_steady if of == "steady" else tables.most_update
    known = (tables.costs, tables.memory, limits)
    low, high = backend.call(narrow, width, of == "steady", most, *known, nets[0], area, finer, nets[1], fine_area)
    return float(low), float(high)


def feasible(tables: Tables, *, steady: float, update: float) -> bool:
    """Whether there may be a plan with B ≤ steady and Ω ≤ update. Cost: O(time keys · L + options).

    False is certain. True is, too, without replicas, recomputation, exposed communication and a number of stages.
    """
    area = bound(tables, steady=steady, update=update)
    if area.states == 0 or tables.fine is None:
        return area.states > 0
    return area_of(tables, tables.fine.net, area.limits)[1] > 0


def area_of(tables: Tables, net: Net, limits: Limits) -> tuple[Area, int]:
    """Return what the limits leave of each of a net's nodes, and how many states that is."""
    area = Area(*(tables.backend.full(len(net.source), 0) for _ in range(3)))
    return area, int(tables.backend.call(windows, tables.width, net, tables.memory, limits, area))
