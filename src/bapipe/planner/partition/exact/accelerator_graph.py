"""Which accelerators a suffix of the pipeline may use: the nodes and options the exact partitioner searches.

Working from the end of the network, a node is all that matters of the stages behind a cut besides the cut itself:
how many accelerators of each type they use (any order), or which stretch of the chain (given order). The number of
accelerators behind also fixes how many micro-batches a stage keeps alive, hence its memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bapipe.planner.partition.exact.problem import Problem

__all__ = ["Graph", "Keys", "chain_graph", "count_graph", "make_keys", "total_graph"]

Ints = NDArray[np.int64]
Moves = dict[tuple[int, int], tuple[Ints, Ints]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Keys:
    """The different costs options can have."""

    time: Ints
    """[time key, (type, replicas, recompute)]"""
    memory: Ints
    """[memory key, (type, recompute, in-flight micro-batches per replica)]"""
    codes: Ints
    """[memory key] the same in one number, ascending"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Graph:
    """Nodes, and options sorted by the node they lead to; options lead from lower to higher nodes."""

    used: Ints
    """[node] accelerators in use"""
    counts: Ints
    """[type, node] accelerators in use of each type; [0, node] if types are not distinguished"""
    final: NDArray[np.bool_]
    """[node] whether a plan may be complete there"""
    start: Ints
    """first option that leads to each node, and the number of options as last entry"""
    before: Ints
    """[option] node it comes from"""
    time: Ints
    """[option] time key"""
    memory: Ints
    """[option] memory key"""


def make_keys(problem: Problem) -> Keys:
    """Return every time and memory key a stage of this problem can have."""
    time = [
        (type_, replicas, flag)
        for type_ in range(problem.types)
        for replicas in range(1, _most_replicas(problem, type_) + 1)
        for flag in {"never": (0,), "allowed": (0, 1), "always": (1,)}[problem.recompute]
    ]
    inflight = np.minimum(problem.inflight[1:], problem.microbatches)
    codes = np.unique(
        np.concatenate(
            [(-(-inflight // replicas) * 2 + flag) * problem.types + type_ for type_, replicas, flag in time]
        )
    )
    memory = np.stack([codes % problem.types, codes // problem.types % 2, codes // problem.types // 2], axis=1)
    return Keys(time=np.array(time), memory=memory, codes=codes)


def total_graph(problem: Problem, keys: Keys) -> Graph:
    """Return the graph whose nodes are numbers of accelerators, 0..N, of whatever type.

    It is exact for one type; for several it forgets how many of each type there are.
    """
    n = problem.accelerators
    numbers = np.arange(n + 1)
    moves: Moves = {}
    for type_ in range(problem.types):
        for replicas in range(1, _most_replicas(problem, type_) + 1):
            moves[type_, replicas] = numbers[replicas:], numbers[:-replicas]
    return _graph(problem, keys, used=numbers, counts=numbers[None], moves=moves)


def count_graph(problem: Problem, keys: Keys) -> Graph:
    """Return the graph whose nodes are numbers of accelerators of each type: Π(counts + 1) of them."""
    shape = tuple(int(count) + 1 for count in problem.counts)
    counts = np.indices(shape).reshape(len(shape), -1)
    numbers = np.arange(counts.shape[1])
    moves: Moves = {}
    for type_ in range(len(shape)):
        stride = int(np.prod(shape[type_ + 1 :], dtype=np.int64))
        for replicas in range(1, _most_replicas(problem, type_) + 1):
            target = numbers[counts[type_] >= replicas]
            moves[type_, replicas] = target, target - replicas * stride
    return _graph(problem, keys, used=counts.sum(axis=0), counts=counts, moves=moves)


def chain_graph(problem: Problem, keys: Keys) -> Graph:
    """Return the graph whose nodes are stretches of the chain, N²/2 of them, or N if all of it must be used.

    Those that end at the same accelerator come together, the shorter first.
    """
    order = np.array(problem.order)
    n = len(order)
    ends = np.arange(n, n + 1) if problem.use_all else np.arange(1, n + 1)
    used = np.concatenate([np.arange(count + 1) for count in ends])
    first = np.repeat(ends, ends + 1) - used
    alike = np.ones(n + 1, np.int64)
    for index in range(n - 2, -1, -1):
        if order[index] == order[index + 1]:
            alike[index] += alike[index + 1]
    type_at = np.append(order, -1)
    numbers = np.arange(len(used))
    moves: Moves = {}
    for type_ in range(problem.types):
        for replicas in range(1, _most_replicas(problem, type_) + 1):
            fits = (used >= replicas) & (type_at[first] == type_) & (alike[first] >= replicas)
            moves[type_, replicas] = numbers[fits], numbers[fits] - replicas
    return _graph(problem, keys, used=used, counts=used[None], moves=moves)


def _most_replicas(problem: Problem, type_: int) -> int:
    return min(problem.max_replicas, int(problem.counts[type_]))


def _graph(problem: Problem, keys: Keys, *, used: Ints, counts: Ints, moves: Moves) -> Graph:
    """Sort the moves, (node, node before) per type and replicas, into options. Cost: O(options log options)."""
    most = problem.accelerators if problem.num_stages is None else problem.num_stages
    inflight = np.minimum(problem.inflight, problem.microbatches)
    columns = []
    for key, (type_, replicas, flag) in enumerate(keys.time.tolist()):
        target, before = (part[used[moves[type_, replicas][0]] <= most] for part in moves[type_, replicas])
        code = (-(-inflight[used[target]] // replicas) * 2 + flag) * problem.types + type_
        columns.append(np.stack([target, before, np.full(len(target), key), np.searchsorted(keys.codes, code)]))
    table = np.concatenate(columns, axis=1)
    table = table[:, np.argsort(table[0], kind="stable")]
    final = used > 0
    if problem.num_stages is not None:
        final &= used == problem.num_stages
    if problem.use_all:
        final &= used == problem.accelerators
    return Graph(
        used=used,
        counts=counts,
        final=final,
        start=np.searchsorted(table[0], np.arange(len(used) + 1)),
        before=table[1],
        time=table[2],
        memory=table[3],
    )
