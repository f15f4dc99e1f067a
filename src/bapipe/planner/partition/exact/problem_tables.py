"""A problem as the kernels want it: what of it does not depend on thresholds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.partition.exact.accelerator_graph import (
    Graph,
    Keys,
    chain_graph,
    count_graph,
    make_keys,
    total_graph,
)
from bapipe.planner.partition.exact.kernels import Backend, KernelCosts, Memory, Net, reach_memory
from bapipe.planner.partition.exact.problem import Problem

__all__ = ["MAX_NODES", "Fine", "Tables", "prepare", "reach"]

MAX_NODES = 2_000_000
"""numbers of accelerators of each type that are distinguished; beyond, only the relaxation is used"""

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
    costs: KernelCosts
    memory: Memory
    coarse: Net
    coarse_exact: bool
    """whether the coarse net is the problem itself: one type, or a chain"""
    fine: Fine | None
    """None: not needed, or too large"""
    log: Any
    """[number] its binary logarithm, rounded down"""


def prepare(problem: Problem, *, backend: Backend) -> Tables:
    """Return a problem's tables. Cost: O(options log options + memory keys · L log L).

    Options are at most nodes · types · replicas, twice that with recomputation; memory keys are the different
    (type, recompute, in-flight micro-batches) there are.
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
        costs=KernelCosts(
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
    type_, again, inflight = keys.memory.T
    width = problem.layers + 1
    memory = Memory(*(backend.positions(len(type_) * width) for _ in range(3)))
    backend.call(
        reach_memory,
        width,
        backend.hold(np.concatenate([[0], np.cumsum(problem.weights_bytes)])),
        backend.hold(np.concatenate([[0], np.cumsum(problem.saved_bytes)])),
        backend.hold(problem.input_bytes),
        int(problem.input_bytes.min()),
        backend.hold(problem.capacity[type_] - problem.overhead[type_] + extra),
        backend.hold(inflight),
        backend.hold(again),
        memory,
    )
    return Memory(*(np.asarray(part, np.int32) for part in memory))
