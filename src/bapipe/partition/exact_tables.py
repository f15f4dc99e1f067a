"""A problem as the kernels want it, and its least fill Φ under thresholds on the steady term and on the update.

Three programmes, from cheap to dear, all under the same limits: `bound` says which states can matter at all;
`relaxed` finds the least Φ when stages may take accelerators of any type at a charge per type (a Lagrangian bound,
exact for one type or a chain); `exact` runs over the numbers used of each type, in what that bound leaves over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bapipe.partition.exact_graph import Graph, Keys, chain_graph, count_graph, make_keys, total_graph
from bapipe.partition.exact_kernels import (
    Area,
    Backend,
    Costs,
    Limits,
    Memory,
    Net,
    limit_times,
    narrow,
    reach_memory,
    windows,
)
from bapipe.partition.exact_problem import Choice, Problem
from bapipe.partition.exact_programme import Pruning, fill_arrays, fill_loops, shrink, to_go, trace

__all__ = [
    "MAX_NODES",
    "Fine",
    "Found",
    "Relaxed",
    "Tables",
    "Windows",
    "bound",
    "bracket",
    "choices",
    "exact",
    "feasible",
    "prepare",
    "reach",
    "relaxed",
]

MAX_NODES = 2_000_000
"""numbers of accelerators of each type that are told apart; beyond, only the relaxation is used"""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fine:
    """The net that counts accelerators of each type, where the coarse one does not."""

    net: Net
    counts: Ints
    """[type, node] accelerators used"""
    coarse: Any
    """[node] coarse node"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tables:
    """What does not depend on thresholds. Arrays for kernels are numpy arrays or lists, as the backend has it."""

    backend: Backend
    keys: Keys
    width: int
    """L + 1 positions"""
    exposed: bool
    counts: Ints
    """[type] accelerators there are"""
    use_all: bool
    least_fill: float
    """no plan has a smaller Φ"""
    most_fill: float
    """no plan has a larger Φ"""
    most_steady: float
    """no plan has a larger B"""
    most_update: float
    """no plan has a larger Ω"""
    costs: Costs
    memory: Memory
    coarse: Net
    coarse_exact: bool
    """whether the coarse net is the problem itself: one type, or a chain"""
    fine: Fine | None
    """None: not needed, or too large"""
    log: Any
    """[number] its binary logarithm, rounded down"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Windows:
    """What one pair of thresholds leaves of the states."""

    steady: float
    update: float
    limits: Limits
    coarse: Area
    states: int
    """0: no plan keeps the thresholds"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
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
    found: Found | None
    """the relaxed plan, if it is a plan"""
    charges: Floats
    """[type] seconds per accelerator"""
    value: Any
    """[coarse state] least Φ and charges of the suffix"""


def prepare(problem: Problem, *, backend: Backend) -> Tables:
    """Return a problem's tables. Cost: O(options log options + memory keys · L log L).

    Options are at most nodes · types · replicas, twice that with recomputation; memory keys are the different
    (type, recompute, live micro-batches) there are.
    """
    hold, types, width = backend.hold, problem.types, problem.layers + 1
    keys = make_keys(problem)
    type_, replicas, again = keys.time.T
    work = np.zeros((2 * types, width))
    np.cumsum(problem.forward + problem.backward, axis=1, out=work[:types, 1:])
    np.cumsum(2 * problem.forward + problem.backward, axis=1, out=work[types:, 1:])
    rows = type_ + types * again
    rounds = np.array([0.0, *(-(-problem.microbatches // r) - 1 for r in range(1, problem.max_replicas + 1))])
    step = np.zeros((len(type_), width))
    seconds = problem.reduce_rate[replicas][:, None] * problem.gradient_bytes + problem.update[type_]
    np.cumsum(seconds, axis=1, out=step[:, 1:])
    cut, link = np.zeros(width), np.zeros(width)
    cut[1:-1] = problem.send_forward + problem.send_backward
    link[1:-1] = cut[1:-1] if problem.duplex_half else np.maximum(problem.send_forward, problem.send_backward)
    cut[np.isinf(cut)] = 0.0
    chained = problem.order is not None and types > 1
    return Tables(
        backend=backend,
        keys=keys,
        width=width,
        exposed=problem.count_communication == "exposed",
        counts=problem.counts,
        use_all=problem.use_all,
        least_fill=float(np.diff(work[rows], axis=1).min(axis=0).sum()),
        most_fill=float(np.diff(work[rows], axis=1).max(axis=0).sum() + cut.sum()),
        most_steady=float(rounds[1] * (work[rows, -1].max() + cut.max())),
        most_update=float(step[:, -1].max()),
        costs=Costs(
            work=hold(work.reshape(-1)),
            row=hold(rows * width),
            replicas=hold(replicas),
            rounds=hold(rounds[replicas]),
            step=hold(step.reshape(-1)),
            rounds_of=hold(rounds),
            link=hold(link),
            cut=hold(cut),
        ),
        memory=reach(problem, keys, backend=backend),
        coarse=_net(chain_graph(problem, keys) if chained else total_graph(problem, keys), backend),
        coarse_exact=chained or types == 1,
        fine=None if chained or types == 1 else _fine(problem, keys, backend),
        log=hold(np.array([0, *(number.bit_length() - 1 for number in range(1, width + 1))])),
    )


def _fine(problem: Problem, keys: Keys, backend: Backend) -> Fine | None:
    if math.prod(count + 1 for count in problem.counts.tolist()) > MAX_NODES:
        return None
    graph = count_graph(problem, keys)
    return Fine(net=_net(graph, backend), counts=graph.counts, coarse=backend.hold(graph.used))


def _net(graph: Graph, backend: Backend) -> Net:
    parts = (graph.start, graph.before, graph.time, graph.memory, graph.used == 0, graph.final)
    return Net(*(backend.hold(part) for part in parts))


def reach(problem: Problem, keys: Keys, *, backend: Backend, extra: int = 0) -> Memory:
    """Return how far stages may reach for memory's sake, if every accelerator had `extra` bytes more."""
    type_, again, live = keys.memory.T
    width = problem.layers + 1
    memory = Memory(*(backend.positions(len(type_) * width) for _ in range(3)))
    backend.call(
        reach_memory,
        width,
        backend.hold(np.concatenate([[0], np.cumsum(problem.weights_bytes)])),
        backend.hold(np.concatenate([[0], np.cumsum(problem.stash_bytes)])),
        backend.hold(problem.input_bytes),
        int(problem.input_bytes.min()),
        backend.hold(problem.capacity[type_] - problem.overhead[type_] + extra),
        backend.hold(live),
        backend.hold(again),
        memory,
    )
    return Memory(*(np.asarray(part, np.int32) for part in memory))


def bound(tables: Tables, *, steady: float, update: float) -> Windows:
    """Return the coarse states that plans with B ≤ steady and Ω ≤ update may use, and perhaps more.

    Cost: O(time keys · L + coarse options). No states means that there is certainly no such plan.
    """
    backend, width = tables.backend, tables.width
    keys = len(tables.costs.row) * width
    limits = Limits(*(backend.positions(size) for size in (keys, keys, width, width, width)))
    backend.call(limit_times, width, steady, update, tables.costs, limits)
    area, states = _area(tables, tables.coarse, limits)
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
    return _area(tables, tables.fine.net, area.limits)[1] > 0


def _area(tables: Tables, net: Net, limits: Limits) -> tuple[Area, int]:
    area = Area(*(tables.backend.full(len(net.source), 0) for _ in range(3)))
    return area, int(tables.backend.call(windows, tables.width, net, tables.memory, limits, area))


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
) -> tuple[Found | None, int]:
    """Return the plan of least Φ among those within the thresholds with Φ ≤ cutoff, None if there is none.

    `start` is a relaxation under the same thresholds: the closer its bound to the least Φ, and that to the cutoff,
    the fewer states are visited; how many is the second result, and it is −1, with None, if they would exceed
    max_states. Cost per state as in `relaxed`. Needs tables.fine.
    """
    assert tables.fine is not None
    backend, width, fine = tables.backend, tables.width, tables.fine
    types, replicas, _ = tables.keys.time.T
    part, states = _area(tables, fine.net, area.limits)
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


def _fill(
    tables: Tables, net: Net, area: Windows, part: Area, charge: Any, value: Floats, pruning: Pruning
) -> None:
    full, width = tables.backend.full, tables.width
    compiled = tables.backend.compiled
    tables.backend.call(
        fill_loops if compiled else fill_arrays,
        width,
        net,
        tables.costs,
        tables.memory,
        area.limits,
        part,
        area.steady,
        tables.exposed,
        charge,
        value,
        tables.log,
        full(width * width.bit_length() if compiled else 0, 0.0),
        full(width if compiled else 0, 0),
        pruning,
    )


def _trace(
    tables: Tables, net: Net, area: Windows, part: Area, charge: Any, value: Floats
) -> tuple[float, Found] | None:
    """Return the least value with charges, and the plan that has it."""
    full, stages = tables.backend.full, tables.width - 1
    path_key, path_start, reached = full(stages, 0), full(stages, 0), full(4, 0.0)
    count = tables.backend.call(
        trace,
        tables.width,
        net,
        tables.costs,
        tables.memory,
        area.limits,
        part,
        area.steady,
        tables.exposed,
        charge,
        value,
        path_key,
        path_start,
        reached,
    )
    if count == 0:
        return None
    found = Found(
        path=tuple((int(path_key[stage]), int(path_start[stage])) for stage in range(count)),
        fill=float(reached[3]),
        steady=float(reached[1]),
        update=float(reached[2]),
    )
    return float(reached[0]), found


def choices(tables: Tables, found: Found) -> list[Choice]:
    """Return the stages of a plan, first one first."""
    stops = [start for _, start in found.path[1:]] + [tables.width - 1]
    result = []
    for (key, start), stop in zip(found.path, stops, strict=True):
        type_, replicas, again = tables.keys.time[key].tolist()
        result.append(
            Choice(first_layer=start, last_layer=stop - 1, type=type_, replicas=replicas, recompute=bool(again))
        )
    return result
