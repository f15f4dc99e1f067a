"""What bounds the exact partitioner's search: reach of stages, and which states can matter.

Kernels have one source, compiled by numba or run as plain Python on lists.

Positions 0..L stand between layers: a stage [i, j) holds layers i..j−1 and starts at the cut i. A node says which
accelerators the suffix behind a cut uses; an option leads to a node from a smaller one by one stage in front. A
state is (node, position): the suffix from that position, on that node's accelerators. Nodes are numbered so that
options lead from lower to higher numbers. All tables are flat: row · (L + 1) + position.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

__all__ = [
    "Area",
    "Backend",
    "KernelCosts",
    "Limits",
    "Memory",
    "Net",
    "limit_times",
    "may_hold",
    "narrow",
    "reach_memory",
    "windows",
]


class Net(NamedTuple):
    """Nodes and options, sorted by the node they lead to."""

    start: Any
    """first option of each node, and the number of options as last entry"""
    before: Any
    """node an option comes from"""
    time: Any
    """time key of an option: type, replicas, whether it recomputes"""
    memory: Any
    """memory key of an option: type, whether it recomputes, in-flight micro-batches"""
    source: Any
    """nodes that use nothing"""
    final: Any
    """nodes at which a plan may be complete"""


class KernelCosts(NamedTuple):
    """Seconds that do not depend on thresholds."""

    work: Any
    """[type and whether it recomputes, position] prefix sums, per micro-batch"""
    row: Any
    """[time key] start of its row in work"""
    replicas: Any
    """[time key]"""
    rounds: Any
    """[time key] ⌈M/r⌉ − 1"""
    step: Any
    """[time key, position] prefix sums of all-reduce and optimizer step"""
    rounds_of: Any
    """[r] ⌈M/r⌉ − 1"""
    link: Any
    """[position] seconds a micro-batch holds the link of the cut; inf if forbidden"""
    cut: Any
    """[position] seconds a micro-batch needs both ways; 0 if forbidden"""


class Memory(NamedTuple):
    """[memory key, position] how far a stage may reach for memory's sake."""

    far: Any
    """largest j for which [i, j) fits; i if not one layer does"""
    outer: Any
    """the same at the smallest input of any layer: not smaller than far, and monotone"""
    near: Any
    """smallest i with outer[i] ≥ j"""


class Limits(NamedTuple):
    """What thresholds on B and Ω allow."""

    far: Any
    """[time key, position] largest j for which [i, j) keeps them"""
    near: Any
    """[time key, position] smallest i for which [i, j) keeps them"""
    replicas: Any
    """[position] replicas both neighbours of the cut need for its link to keep up; too many if none suffice"""
    next: Any
    """[position] first usable cut from here on; 0 and L always are"""
    previous: Any
    """[position] last usable cut up to here"""


class Area(NamedTuple):
    """Per node, the interval of positions in which states are looked at: none if front < back."""

    back: Any
    front: Any
    offset: Any
    """index of the state (node, back)"""


def reach_memory(
    width: int,
    weights: Any,
    saved: Any,
    inputs: Any,
    least_input: int,
    room: Any,
    inflight: Any,
    again: Any,
    memory: Any,
) -> None:
    """Fill `memory` from prefix sums of bytes; O(L) per memory key, O(L log L) if it recomputes."""
    last = width - 1
    far, outer, near = memory
    for key in range(len(room)):
        row = key * width
        depth = 1 if again[key] else inflight[key]
        held = inflight[key] * least_input if again[key] else 0
        free = room[key] - held
        j = 0
        for i in range(width):
            if j < i:
                j = i
            while j < last and weights[j + 1] - weights[i] + depth * (saved[j + 1] - saved[i]) <= free:
                j += 1
            outer[row + i] = j
            far[row + i] = j
        if again[key]:
            for i in range(last):
                free = room[key] - inflight[key] * inputs[i]
                low = i
                high = outer[row + i]
                while low < high:
                    middle = (low + high + 1) // 2
                    if weights[middle] - weights[i] + saved[middle] - saved[i] <= free:
                        low = middle
                    else:
                        high = middle - 1
                far[row + i] = low
        i = 0
        for j in range(width):
            while i < j and outer[row + i] < j:
                i += 1
            near[row + j] = i


def limit_times(width: int, steady: float, update: float, costs: Any, limits: Any) -> None:
    """Fill `limits` for B ≤ steady and Ω ≤ update; O(L) per time key."""
    last = width - 1
    work, row_of, _, rounds_of_key, step, rounds_of, link, _ = costs
    far, near, replicas_at, following, previous = limits
    for key in range(len(row_of)):
        row = key * width
        base = row_of[key]
        rounds = rounds_of_key[key]
        j = 0
        for i in range(width):
            if j < i:
                j = i
            while (
                j < last
                and rounds * (work[base + j + 1] - work[base + i]) <= steady
                and step[row + j + 1] - step[row + i] <= update
            ):
                j += 1
            far[row + i] = j
        i = 0
        for j in range(width):
            while i < j and far[row + i] < j:
                i += 1
            near[row + j] = i
    too_many = len(rounds_of)
    usable = 0
    for p in range(width):
        replicas = 1
        if p == 0 or p == last:
            replicas = 0
        elif link[p] == np.inf:
            replicas = too_many
        else:
            while replicas < too_many and rounds_of[replicas] * link[p] > steady:
                replicas += 1
        replicas_at[p] = replicas
        if replicas < too_many:
            usable = p
        previous[p] = usable
    for p in range(last, -1, -1):
        if replicas_at[p] < too_many:
            usable = p
        following[p] = usable


def windows(width: int, net: Any, memory: Any, limits: Any, area: Any) -> int:
    """Set for every node an interval back..front outside which no state is part of a plan within the limits.

    back is the furthest a suffix on these accelerators or fewer reaches, front the furthest a prefix on those left
    over or fewer, both by greedy extension: a part of a stage that keeps the limits keeps them too. Return how
    many states lie inside, 0 if there is certainly no plan. Cost: O(options).
    """
    start, before_of, time, memory_of, source, final = net
    _, outer, memory_near = memory
    far, near, _, following, previous = limits
    back, front, offset = area
    last = width - 1
    nodes = len(source)
    first_cut = following[1]
    last_cut = previous[last - 1]
    for node in range(nodes):
        best = last if source[node] else width
        floor = 0 if final[node] else first_cut
        for option in range(start[node], start[node + 1]):
            j = back[before_of[option]]
            if j <= last:
                i = max(near[time[option] * width + j], memory_near[memory_of[option] * width + j])
                best = min(best, max(following[i], floor))
        back[node] = best
        front[node] = 0 if final[node] else -1
    for node in range(nodes - 1, -1, -1):
        i = front[node]
        if i < back[node]:
            continue
        for option in range(start[node], start[node + 1]):
            before = before_of[option]
            j = min(far[time[option] * width + i], outer[memory_of[option] * width + i])
            j = min(previous[j], last if source[before] else last_cut)
            front[before] = max(front[before], j)
    total = 0
    alive = False
    for node in range(nodes):
        offset[node] = total
        if front[node] >= back[node]:
            total += front[node] - back[node] + 1
            alive = alive or source[node]
    return total if alive else 0


def may_hold(
    width: int,
    steady: float,
    update: float,
    costs: Any,
    memory: Any,
    limits: Any,
    net: Any,
    area: Any,
    finer: bool,
    fine: Any,
    fine_area: Any,
) -> bool:
    """Whether there may be a plan with B ≤ steady and Ω ≤ update by the net and, if any, the finer one."""
    limit_times(width, steady, update, costs, limits)
    if windows(width, net, memory, limits, area) == 0:
        return False
    return not finer or windows(width, fine, memory, limits, fine_area) > 0


def narrow(
    width: int,
    on_steady: bool,
    most: float,
    costs: Any,
    memory: Any,
    limits: Any,
    net: Any,
    area: Any,
    finer: bool,
    fine: Any,
    fine_area: Any,
) -> tuple[float, float]:
    """Return (a, b) such that no plan has a B (else an Ω) under a and one may have b, b − a ≤ 10⁻⁶ b.

    Twice inf if not even `most` may be had. Cost: about 20 times `may_hold`.
    """
    low = 0.0
    high = most
    first = True
    middle = most
    while first or high - low > 1e-6 * high:
        steady = middle if on_steady else np.inf
        update = np.inf if on_steady else middle
        allowed = may_hold(width, steady, update, costs, memory, limits, net, area, finer, fine, fine_area)
        if first:
            if not allowed:
                return np.inf, np.inf
            steady = 0.0 if on_steady else np.inf
            update = np.inf if on_steady else 0.0
            if may_hold(width, steady, update, costs, memory, limits, net, area, finer, fine, fine_area):
                return 0.0, 0.0
            first = False
        elif allowed:
            high = middle
        else:
            low = middle
        middle = low + (high - low) / 2
    return low, high


class Backend:
    """How kernels run and on what: compiled on numpy arrays, or as they stand, on lists where they loop."""

    __slots__ = ("compiled",)

    def __init__(self, *, compiled: bool) -> None:
        """With `compiled`, numba is loaded at the first call."""
        self.compiled = compiled

    def hold(self, array: Any) -> Any:
        """Return the array as kernels want it."""
        return np.ascontiguousarray(array) if self.compiled else np.asarray(array).tolist()

    def full(self, size: int, value: float) -> Any:
        """Return `size` copies of the value, 64 bits wide."""
        return np.full(size, value) if self.compiled else [value] * size

    def positions(self, size: int) -> Any:
        """Return room for `size` positions."""
        return np.zeros(size, np.int32) if self.compiled else [0] * size

    def call(self, kernel: Callable[..., Any], *arguments: Any) -> Any:
        """Run a kernel."""
        return (_compile(kernel) if self.compiled else kernel)(*arguments)


@functools.cache
def _compile(kernel: Callable[..., Any]) -> Callable[..., Any]:
    numba = importlib.import_module("numba")
    for helper in (limit_times, windows, may_hold):
        _callable_from_kernels(helper)
    return numba.njit(cache=True)(kernel)  # type: ignore[no-any-return]


@functools.cache
def _callable_from_kernels(helper: Callable[..., Any]) -> None:
    importlib.import_module("numba.extending").register_jitable(helper)
