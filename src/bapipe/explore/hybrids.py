"""Pipelines of few, replicated stages that the accelerators divide evenly.

The exact partition goes by a formula that takes stages to fill and drain as if alike. Straight pipelines of uneven
stages take longer than it says, replicated ones do not, so some of these are always simulated as well.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from bapipe.chain import Chain
from bapipe.evaluate import Hardware, StageChoice, all_reduce_time
from bapipe.partition.cuts import starts

__all__ = ["balanced_hybrids"]

_TRIED = 12
"""hybrids that are simulated, the best by the formula"""
_THREE_STAGES = 16
"""accelerators up to which they may also be dealt to three stages"""


def balanced_hybrids(chain: Chain, hardware: Hardware, microbatches: int) -> list[tuple[StageChoice, ...]]:
    """Two or three stages over all accelerators, some replicated, cut so that each replica has as much to do.

    Only where accelerators are alike and any can send to any: the exact partition knows the others' rules.
    """
    cluster = hardware.cluster
    count = len(cluster)
    if len(chain.types) > 1 or cluster.topology == "chain":
        return []
    work = chain.work[0]
    done = np.cumsum(work)
    scored: list[tuple[float, tuple[StageChoice, ...]]] = []
    for replicas in _shares(count, microbatches):
        wanted = np.cumsum(replicas)[:-1] / count * done[-1]
        near = np.searchsorted(done, wanted)
        for cuts in itertools.product(*([at - 1, at] for at in near.tolist())):
            if cuts[0] < 0 or cuts[-1] >= len(chain) - 1 or list(cuts) != sorted(set(cuts)):
                continue
            stages = _stages((*cuts, len(chain) - 1), replicas)
            scored.append((_time(chain, hardware, stages, microbatches), stages))
    scored.sort(key=lambda item: item[0])
    return [stages for _, stages in scored[:_TRIED]]


def _shares(count: int, microbatches: int) -> Iterator[tuple[int, ...]]:
    """How many accelerators each stage gets; none more than there are micro-batches."""
    most = min(count - 1, microbatches)
    yield from ((first, count - first) for first in range(max(1, count - most), most + 1) if count > 2)
    if count <= _THREE_STAGES:
        for first, second in itertools.product(range(1, most + 1), repeat=2):
            third = count - first - second
            if 1 <= third <= most and max(first, second, third) > 1:
                yield first, second, third


def _stages(cuts: tuple[int, ...], replicas: tuple[int, ...]) -> tuple[StageChoice, ...]:
    edges = [0, *itertools.accumulate(replicas)]
    return tuple(
        StageChoice(first=first, last=last, accelerators=tuple(range(low, high)))
        for first, last, (low, high) in zip(starts(cuts), cuts, itertools.pairwise(edges), strict=True)
    )


def _time(chain: Chain, hardware: Hardware, stages: tuple[StageChoice, ...], microbatches: int) -> float:
    """Seconds per mini-batch by the exact partition's formula (`exact_problem`), links taken as free."""
    work = [float(chain.work[0, stage.first : stage.last + 1].sum()) for stage in stages]
    steady = max(
        (-(-microbatches // len(stage.accelerators)) - 1) * own for stage, own in zip(stages, work, strict=True)
    )
    sums = [
        all_reduce_time(
            hardware.cluster, stage.accelerators, float(chain.weight_bytes[stage.first : stage.last + 1].sum())
        )
        for stage in stages
    ]
    return sum(work) + steady + max(sums)
