"""Cuts inside layers: which layers are tried divided, and the best cuts where a part costs more than its share.

The exact partition (`bapipe.planner.partition.exact.solve`) adds up what units cost and cannot see a cost that
depends on where a stage begins or ends. Here the order of accelerators and the number of stages are given and only
the cuts are looked for: a dynamic programme over (stage, last unit) has such costs, and the memory of
`stage_bytes`, in it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bapipe.costs.segments import Chain
from bapipe.costs.stage_memory import every_run_bytes
from bapipe.costs.stage_time import UnitSeconds, every_run
from bapipe.errors import InfeasibleError
from bapipe.hardware.cluster import Link
from bapipe.planner.candidate import Hardware, StageChoice
from bapipe.planner.partition.paper.intra_layer import refine
from bapipe.planner.partition.paper.stage_cuts import starts
from bapipe.planner.pipelines import Family, optimal, unreplicated_stages
from bapipe.planner.request import Request
from bapipe.planner.tuning import DEFAULT_TUNING, Tuning

__all__ = [
    "divided_stages",
    "parts_cost_more",
    "refined",
    "split_stages",
    "splits_everywhere",
    "staggered_stages",
]

Floats = NDArray[np.float64]


@functools.lru_cache(maxsize=16)
def refined(chain: Chain, slices: int = DEFAULT_TUNING.slices) -> Chain:
    """The chain with every layer that may be divided in slices."""
    return refine(chain, range(len(chain.profile.layers)), slices)


def splits_everywhere(chain: Chain, hardware: Hardware, request: Request, tuning: Tuning = DEFAULT_TUNING) -> bool:
    """Whether every layer that may be divided is tried so, and at every depth: where that is not too much."""
    divides = request.split_layers and request.strategy in ("exact", "gpipe") and request.space == "full"
    return divides and len(refined(chain, tuning.slices)) * len(hardware.cluster) <= tuning.thorough_size


def split_stages(
    finer: Chain,
    stages: Sequence[StageChoice],
    hardware: Hardware,
    family: Family,
    microbatches: int,
    link: Link,
    tuning: Tuning = DEFAULT_TUNING,
) -> Iterator[tuple[Chain, list[StageChoice]]]:
    """The optimum of as many stages on the finer chain, as if parts cost their share; then with what they cost."""
    if all(unit.whole for unit in finer.units):
        return
    # What does not fit by what is known before the cuts are may fit: `divided_stages` weighs more closely.
    with contextlib.suppress(InfeasibleError):
        best = optimal(finer, hardware, family, microbatches, num_stages=len(stages), link=link, tuning=tuning)
        yield finer, best
        stages = best
    if parts_cost_more(finer) and len(finer) * len(hardware.cluster) <= tuning.thorough_size:
        for cut in divided_stages(finer, stages, hardware, family, microbatches, tuning):
            yield finer, cut


def parts_cost_more(chain: Chain) -> bool:
    """Whether anything is known of what a part costs beyond its share."""
    known = (chain.part_forward, chain.part_backward, chain.part_saved_activations, chain.shared_weight_bytes)
    return any(bool(values.any()) for values in known)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Spans:
    """Figures of every run of units: [first, last], infinite where last < first."""

    work: Floats
    """seconds per micro-batch, recomputation included"""
    steady: Floats
    """seconds per micro-batch that the stage or the link after it is busy"""
    deferrable: Floats
    """seconds per micro-batch of weight gradients that can be deferred"""
    fits: NDArray[np.bool_]


def divided_stages(
    chain: Chain,
    stages: Sequence[StageChoice],
    hardware: Hardware,
    family: Family,
    microbatches: int,
    tuning: Tuning = DEFAULT_TUNING,
) -> list[list[StageChoice]]:
    """The best cuts for the accelerators of these stages, one each, in their order; [] if none fits.

    The time is that of `bapipe.planner.partition.exact.problem`, T = Φ + B, with what parts cost on top. Two are
    returned where they differ: the least longest stage, and the least T of a few limits between that and where a
    longer one cannot pay. Cost: stages · units² for each limit.
    """
    spans, sends = _spans(chain, stages, hardware, family, microbatches)
    shortest, least = _least(spans, None, sends), _least(spans, np.inf, sends)
    if shortest is None or least is None:
        return []

    def time(cuts: Sequence[int]) -> float:
        return _fill(spans, sends, cuts) + (microbatches - 1) * _longest(spans, cuts)

    low = high = _longest(spans, shortest)
    if microbatches > 1:
        high = max(low, (time(shortest) - _fill(spans, sends, least)) / (microbatches - 1))
    limits = np.linspace(low, high, tuning.split_limits)
    trials = [_least(spans, float(limit) * (1 + 1e-12), sends) for limit in limits]
    quickest = min((cuts for cuts in (shortest, *trials) if cuts is not None), key=time)
    members = [stage.accelerators[0] for stage in stages]
    return [
        [
            replace(choice, recompute=stage.recompute)
            for choice, stage in zip(unreplicated_stages(cuts, members), stages, strict=True)
        ]
        for cuts in dict.fromkeys((tuple(shortest), tuple(quickest)))
    ]


def staggered_stages(
    chain: Chain, stages: Sequence[StageChoice], hardware: Hardware, family: Family, microbatches: int
) -> list[StageChoice] | None:
    """The cuts for an order in which no stage waits but at its ends; None if none fits.

    Stage i begins i forwards late. Where it has no weight gradients to defer it is done i input gradients before
    the end, else it fills that time with them: so it may have more work. The least T of

        Φ_i + M·work_i + max(0, D_i − M·W_i) ≤ T

    is looked for, with Φ_i and D_i, what comes before and after, by the stages' mean.
    """
    spans, sends = _spans(chain, stages, hardware, family, microbatches)
    members = [stage.accelerators[0] for stage in stages]
    count, cluster = len(stages), hardware.cluster
    rows = [chain.row(cluster.accelerators[member].type) for member in members]
    send = float(np.mean([item.min() for item in sends[:-1]])) / 2 if count > 1 else 0.0
    units = UnitSeconds.of(chain)
    ahead = float(units.forward[rows].sum(axis=1).mean()) / count + send
    back = float((units.backward - units.weight_gradient)[rows].sum(axis=1).mean()) / count + send
    limited = []
    for index, span in enumerate(spans):
        ends = index * ahead + np.maximum(0.0, index * back - microbatches * span.deferrable)
        limited.append(replace(span, steady=span.work + ends / microbatches))
    cuts = _least(limited, None, sends)
    return None if cuts is None else unreplicated_stages(cuts, members)


def _spans(
    chain: Chain, stages: Sequence[StageChoice], hardware: Hardware, family: Family, microbatches: int
) -> tuple[list[_Spans], list[Floats]]:
    """For each stage's accelerator every run of units, and the seconds to send both ways after each unit."""
    cluster = hardware.cluster
    members = [stage.accelerators[0] for stage in stages]
    count = len(stages)
    links = [cluster.link(one, other) for one, other in itertools.pairwise(members)]
    memory = every_run_bytes(chain)
    rows = [chain.row(cluster.accelerators[member].type) for member in members]
    seconds = {row: every_run(chain, row) for row in dict.fromkeys(rows)}
    spans, sends = [], []
    for index, (stage, member) in enumerate(zip(stages, members, strict=True)):
        there = back = busy = np.zeros(len(chain))
        if index + 1 < count:
            link = links[index]
            there = chain.boundary_forward / link.bandwidth + link.latency
            back = chain.return_seconds(link.bandwidth, link.latency)
            busy = there + back if link.duplex == "half" else np.maximum(there, back)
        inflight, waiting = (of(count - index, count, microbatches) for of in (family.inflight, family.waiting))
        needed = memory.held(hardware.static_copies(), inflight, waiting, recompute=stage.recompute)
        own = seconds[rows[index]]
        work = own.work + own.forward if stage.recompute else own.work.copy()
        work[np.tril_indices(len(chain), -1)] = np.inf
        steady = np.maximum(work + (there + back if family.communication == "exposed" else 0.0), busy)
        fits = needed <= cluster.type_of(member).memory
        spans.append(_Spans(work=work, steady=steady, deferrable=own.weight_gradient, fits=fits))
        sends.append(there + back)
    return spans, sends


def _least(spans: Sequence[_Spans], threshold: float | None, sends: Sequence[Floats]) -> list[int] | None:
    """The last unit of each stage: of least fill with no stage busier than the threshold; None: the least busiest.

    None is returned where no cuts fit.
    """
    units = len(sends[0])
    value = np.full(units + 1, np.inf)
    value[0] = 0.0
    choices = []
    for span, send in zip(spans, sends, strict=True):
        if threshold is None:
            trial = np.maximum(value[:-1, None], np.where(span.fits, span.steady, np.inf))
        else:
            allowed = span.fits & (span.steady <= threshold)
            trial = value[:-1, None] + np.where(allowed, span.work + send[None, :], np.inf)
        first = trial.argmin(axis=0)
        choices.append(first)
        value = np.concatenate([[np.inf], trial[first, np.arange(units)]])
    if not np.isfinite(value[-1]):
        return None
    cuts, last = [], units - 1
    for first in reversed(choices):
        cuts.append(last)
        last = int(first[last]) - 1
    return cuts[::-1]


def _fill(spans: Sequence[_Spans], sends: Sequence[Floats], cuts: Sequence[int]) -> float:
    return sum(
        float(span.work[first, last] + send[last])
        for span, send, first, last in zip(spans, sends, starts(cuts), cuts, strict=True)
    )


def _longest(spans: Sequence[_Spans], cuts: Sequence[int]) -> float:
    return max(
        float(span.steady[first, last]) for span, first, last in zip(spans, starts(cuts), cuts, strict=True)
    )
