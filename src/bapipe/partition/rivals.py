"""How other systems cut a network, re-implemented from what they publish, for comparison in one table.

Each returns the last layer of every stage; PipeDream's also the replicas.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from bapipe.errors import BaPipeError

__all__ = ["by_parameters", "by_time", "pipedream", "uniform"]


def _require(layers: int, stages: int) -> None:
    if not 1 <= stages <= layers:
        raise BaPipeError(f"{stages} stages need at least {stages} layers, got {layers}; lower --stages")


def uniform(layers: int, stages: int) -> list[int]:
    """As many layers each, the first stages one more where it does not divide (DeepSpeed's "uniform")."""
    _require(layers, stages)
    size, more = divmod(layers, stages)
    return [size * (stage + 1) + min(stage + 1, more) - 1 for stage in range(stages)]


def by_parameters(weights: Sequence[float], stages: int) -> list[int]:
    """DeepSpeed's "parameters": a dynamic programme that keeps the spread of stage weights small.

    Its state holds the largest and smallest stage of one best prefix, so it is not exact: [1, 4, 1, 1, 2] in 3
    gives a stage of 5 where 4 is possible. O(L²·N), the inner loop vectorised.
    """
    _require(len(weights), stages)
    count = len(weights)
    prefix = np.concatenate([[0.0], np.cumsum(np.asarray(weights, float))])
    largest = np.full((count + 1, stages + 1), np.inf)
    smallest = np.full((count + 1, stages + 1), np.inf)
    previous = np.zeros((count + 1, stages + 1), dtype=int)
    largest[0, 0] = 0.0
    for last in range(1, count + 1):
        sums = prefix[last] - prefix[:last]
        for parts in range(1, min(last, stages) + 1):
            high = np.maximum(largest[:last, parts - 1], sums)
            low = np.minimum(smallest[:last, parts - 1], sums)
            spread = np.where(np.isinf(high), np.inf, high - low)
            # The latest of equal cuts, as a loop that replaces on ties would leave it.
            cut = last - 1 - int(np.argmin(spread[::-1]))
            if np.isinf(spread[cut]):
                continue
            largest[last, parts], smallest[last, parts] = high[cut], low[cut]
            previous[last, parts] = cut
    cuts, end = [], count
    for parts in range(stages, 0, -1):
        cuts.append(end - 1)
        end = int(previous[end, parts])
    return cuts[::-1]


def by_time(times: Sequence[float], stages: int) -> list[int]:
    """torchgpipe's balance by time: the block partition of Bárány and Grinberg (arXiv:1308.2452).

    On times scaled to [0, 1] it moves single layers towards the smallest block until the largest exceeds the
    smallest by at most 1. That bounds the spread, not the longest stage: [1, 1, 1, 1, 2] in 3 gives 4, not 2.
    """
    _require(len(times), stages)
    low, high = min(times), max(times)
    scaled = [0.0 if high == low else (time - low) / (high - low) for time in times]
    prefix = np.concatenate([[0.0], np.cumsum(scaled)])
    ends = [len(times) // stages * (stage + 1) for stage in range(stages - 1)] + [len(times)]

    def sizes() -> list[float]:
        starts = [0, *ends[:-1]]
        return [float(prefix[end] - prefix[start]) for start, end in zip(starts, ends, strict=True)]

    blocks = sizes()
    biggest = max(range(stages), key=lambda block: (blocks[block], block))
    top = blocks[biggest]
    while True:
        blocks = sizes()
        smallest = min(range(stages), key=lambda block: (blocks[block], block))
        if top <= blocks[smallest] + 1:
            return [end - 1 for end in ends]
        if biggest < smallest:
            giver = smallest - 1
            ends[giver] -= 1
        else:
            giver = smallest + 1
            ends[smallest] += 1
        if giver == biggest:
            blocks = sizes()
            biggest = max(range(stages), key=lambda block: (blocks[block], block))
            top = blocks[biggest]


def pipedream(
    *,
    times: Sequence[float],
    activation_bytes: Sequence[float],
    weight_bytes: Sequence[float],
    workers: int,
    bandwidth: float,
    replicate: bool,
) -> list[tuple[int, int, int]]:
    """PipeDream's dynamic programme over one level of the network: (first layer, last layer, replicas) per stage.

    A(j, m) = min over i < j, m' < m of max(A(i, m − m'), 2·a_i/B, T(i+1..j, m')) and
    T(i..j, m) = max(Σ times, 2(m − 1)·Σ weights/(m·B)) / m, in plain loops as published: O(L²·N) straight,
    O(L²·N²) replicated.
    """
    count = len(times)
    _require(count, 1 if replicate else workers)
    work, weight = [0.0], [0.0]
    for time, size in zip(times, weight_bytes, strict=True):
        work.append(work[-1] + time)
        weight.append(weight[-1] + size)

    def stage(first: int, last: int, replicas: int) -> float:
        reduce = 2 * (replicas - 1) / replicas * (weight[last + 1] - weight[first]) / bandwidth
        return max(work[last + 1] - work[first], reduce) / replicas

    best = [[math.inf] * (workers + 1) for _ in range(count)]
    choice: list[list[tuple[int, int] | None]] = [[None] * (workers + 1) for _ in range(count)]
    for last in range(count):
        for used in range(1, workers + 1):
            if replicate or used == 1:
                best[last][used] = stage(0, last, used)
                choice[last][used] = (-1, used)
            for cut in range(last):
                sent = 2 * activation_bytes[cut] / bandwidth
                for replicas in range(1, used) if replicate else (1,):
                    before = best[cut][used - replicas]
                    if before >= best[last][used] or sent >= best[last][used]:
                        continue
                    longest = max(before, sent, stage(cut + 1, last, replicas))
                    if longest < best[last][used]:
                        best[last][used] = longest
                        choice[last][used] = (cut, replicas)
    stages: list[tuple[int, int, int]] = []
    last, used = count - 1, workers
    while last >= 0:
        picked = choice[last][used]
        assert picked is not None
        cut, replicas = picked
        stages.append((cut + 1, last, replicas))
        last, used = cut, used - replicas
    return stages[::-1]
