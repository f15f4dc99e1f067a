"""How other systems cut a network into stages, re-implemented from their published behaviour, to compare with.

All return cuts: the first layer of every stage but the first. Cuts never decrease; where two are equal, or the
last is the number of layers, a stage is empty, as the system itself would leave it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from bapipe.errors import BaPipeError

__all__ = ["PipeDreamPlan", "by_parameter_spread", "by_parameters", "by_time", "pipedream", "uniform"]

Cuts = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipeDreamPlan:
    """What PipeDream's optimizer decides."""

    cuts: Cuts
    replicas: tuple[int, ...]
    """machines of every stage"""
    bottleneck: float
    """seconds per micro-batch of the slowest stage or transfer, by PipeDream's own count"""


def uniform(layers: int, stages: int) -> Cuts:
    """Cut into stages of equally many layers, the first ones larger by one: DeepSpeed's "uniform".

    With fewer layers than stages the last stages are empty.
    """
    _check(layers, stages)
    share, extra = divmod(layers, stages)
    return tuple(stage * share + min(stage, extra) for stage in range(1, stages))


def by_parameters(weights: Sequence[float], stages: int) -> Cuts:
    """Cut so that the largest stage is small in parameters: DeepSpeed's "parameters" up to release 0.13.0.

    Bisects the size of the largest stage to 10⁻³; a trial size fills stages from the front while they stay below
    it. Trailing stages may be empty ([1, 1, 1, 1, 1] in 4 gives layers 2, 2, 1, 0; DeepSpeed pull request 4312).
    As there, a trial below the first layer's weight counts as a success, so that a heavy first layer can leave all
    layers to one stage. Cost: O(stages · log layers) per trial.
    """
    layers = len(weights)
    _check(layers, stages)
    if layers <= stages:
        return uniform(layers, stages)
    sums = list(accumulate(weights))
    low, high = sums[-1] / stages, float(sums[-1])
    while high > low + 1e-3:
        middle = low + (high - low) / 2
        if _filled(sums, stages, middle)[1]:
            high = middle
        else:
            low = middle + 1e-3
    return _filled(sums, stages, high)[0]


def _filled(sums: Sequence[float], stages: int, size: float) -> tuple[Cuts, bool]:
    """Fill stages from the front with less than `size` each; return the cuts and whether the last one fits too."""
    layers = len(sums)
    cuts: list[int] = []
    limit = size
    for _ in range(stages - 1):
        cut = bisect_left(sums, limit)
        if cut == layers:
            rest = sums[-1] - sums[cuts[-1] if cuts else 0]
            return (*cuts, *[layers] * (stages - 1 - len(cuts))), rest < size
        cuts.append(cut)
        limit = sums[cut - 1] + size
    return tuple(cuts), limit >= sums[-1]


def by_parameter_spread(weights: Sequence[float], stages: int) -> Cuts:
    """Cut so that largest and smallest stage differ little in parameters: DeepSpeed's "parameters" since 0.13.1.

    Its dynamic programme keeps one partial cut per prefix and number of stages, the one of least spread (of
    equals, the one with the latest last cut), which does not always lead to the least spread of the whole. Cost:
    O(layers² · stages).
    """
    layers = len(weights)
    _check(layers, stages)
    if layers <= stages:
        return uniform(layers, stages)
    sums = [0.0, *accumulate(weights)]
    # [prefix] -> (spread, largest, smallest, cuts) of the best way to use the stages so far.
    nothing: tuple[float, float, float, Cuts] = (math.inf, math.inf, math.inf, ())
    row = [(0.0, 0.0, math.inf, ()), *[nothing] * layers]
    for stage in range(1, stages + 1):
        following = [nothing] * (layers + 1)
        for stop in range(stage, layers + 1):
            total, best, chosen = sums[stop], nothing, -1
            spread = best[0]
            for start in range(stage - 1, stop):
                _, largest, smallest, _ = row[start]
                size = total - sums[start]
                if size > largest:
                    largest = size
                if size < smallest:
                    smallest = size
                if largest - smallest <= spread:
                    spread, chosen = largest - smallest, start
                    best = (spread, largest, smallest, ())
            following[stop] = (*best[:3], (*row[chosen][3], chosen)) if chosen >= 0 else nothing
        row = following
    return row[layers][3][1:]


def by_time(times: Sequence[float], stages: int) -> Cuts:
    """Cut so that no two stages differ by more than the largest layer: torchgpipe's balance_by_time.

    Block partitions of sequences (Bárány and Grinberg): starting from equal numbers of layers, the smallest stage
    takes a layer from its neighbour towards the largest, until largest and smallest differ by at most the range of
    layer times, after each layer is shortened by the shortest. That is all it promises: [1, 1, 1, 1, 2] in 3 stays
    at 1 | 1 | 1, 1, 2, whose slowest stage takes 4 where 2 is possible. Cost: O(stages · layers³) at worst.
    """
    layers = len(times)
    _check(layers, stages)
    if layers < stages:
        raise BaPipeError(
            f"{stages} stages need at least {stages} layers, got {layers}; lower the number of stages"
        )
    least, span = min(times), max(times) - min(times)
    scaled = [(time - least) / span if span else 0.0 for time in times]
    stops = [layers // stages * stage for stage in range(1, stages)] + [layers]

    def sizes() -> list[tuple[float, int]]:
        starts = [0, *stops[:-1]]
        return [
            (sum(scaled[start:stop]), stage) for stage, (start, stop) in enumerate(zip(starts, stops, strict=True))
        ]

    while True:
        largest, heavy = max(sizes())
        while True:
            smallest, light = min(sizes())
            if largest <= smallest + 1:
                return tuple(stops[:-1])
            neighbour = light - 1 if heavy < light else light + 1
            if heavy < light:
                stops[neighbour] -= 1
            else:
                stops[light] += 1
            if neighbour == heavy:
                break


def pipedream(
    times: Sequence[float],
    *,
    transfer: Sequence[float],
    synchronise: Sequence[float],
    machines: int,
    unreplicated: bool = False,
    counting: Literal["published", "released"] = "published",
) -> PipeDreamPlan:
    """Cut, and replicate stages, by PipeDream's dynamic programme (SOSP 2019, section 3.1, one level).

    On layers 0..j−1 and m machines, A(j, m) = min over k, m' of max( A(k, m − m'), 2·transfer[k−1], T(k, j, m') ),
    with T(i, j, m) = max( Σ times, 2·(m − 1)·Σ synchronise ) / m; A(j, m) starts from T(0, j, m). `transfer` is
    a/B, one crossing of the cut after each layer, and `synchronise` |w|/B per layer, in seconds. All machines are
    used; `unreplicated` allows one per stage. No memory, no fill and drain of the pipeline, machines all alike.
    Plain loops as published: O(L²·N) without replicas, O(L²·N²) with them.

    `counting="released"` counts as the optimizer that its authors released does (msr-fiddle/pipedream,
    optimizer_graph_hierarchical.py): T(i, j, m) = ( Σ times + 4·(m − 1)/m·Σ synchronise ) / m, and a cut costs
    2·transfer/m' where the stage behind it has m' machines.
    """
    layers = len(times)
    _check(layers, machines)
    if len(transfer) != layers - 1 or len(synchronise) != layers:
        raise BaPipeError(
            f"transfer and synchronise must have {layers - 1} and {layers} entries, got {len(transfer)} and "
            f"{len(synchronise)}; match them to times"
        )
    if unreplicated and machines > layers:
        raise BaPipeError(f"{machines} stages need at least {machines} layers, got {layers}; lower machines")
    work = [0.0, *accumulate(times)]
    gradients = [0.0, *accumulate(synchronise)]

    released = counting == "released"

    def stage_time(start: int, stop: int, count: int) -> float:
        compute, exchange = work[stop] - work[start], (count - 1) * (gradients[stop] - gradients[start])
        return (compute + 4 * exchange / count if released else max(compute, 2 * exchange)) / count

    # best[j][m] = (time, first layer of the last stage, machines of the last stage)
    best = [[(math.inf, 0, 0)] * (machines + 1) for _ in range(layers + 1)]
    for m in range(1, machines + 1):
        for stop in range(1, layers + 1):
            choice = (math.inf, 0, 0)
            if m == 1 or not unreplicated:
                choice = (stage_time(0, stop, m), 0, m)
            for start in range(1, stop):
                earlier = best[start]
                for count in range(1, 2 if unreplicated else m):
                    before = earlier[m - count][0]
                    if before >= choice[0]:
                        continue
                    crossing = 2 * transfer[start - 1] / (count if released else 1)
                    if crossing >= choice[0]:
                        continue
                    time = max(before, crossing, stage_time(start, stop, count))
                    if time < choice[0]:
                        choice = (time, start, count)
            best[stop][m] = choice
    cuts: list[int] = []
    replicas: list[int] = []
    stop, m = layers, machines
    while stop:
        _, start, count = best[stop][m]
        cuts.append(start)
        replicas.append(count)
        stop, m = start, m - count
    return PipeDreamPlan(
        cuts=tuple(cuts[-2::-1]), replicas=tuple(reversed(replicas)), bottleneck=best[layers][machines][0]
    )


def _check(layers: int, stages: int) -> None:
    if layers < 1:
        raise BaPipeError(f"layers must be at least 1, got {layers}; give the network's layers")
    if stages < 1:
        raise BaPipeError(f"stages must be at least 1, got {stages}; raise it")
