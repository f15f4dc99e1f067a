"""Pipelines with replicas: of few stages that the accelerators divide evenly, and whole ones replicated.

The exact partition goes by a formula that takes stages to fill and drain as if alike. Pipelines of uneven stages
without replicas take longer than it says, replicated ones do not, so some of these are always simulated as well.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from bapipe.costs.held_weights import stage_gradients
from bapipe.costs.segments import Chain
from bapipe.costs.stage_time import UnitSeconds, stage_seconds
from bapipe.hardware.cluster import Cluster
from bapipe.planner.candidate import Candidate, Hardware, StageChoice, stage_shape
from bapipe.planner.fixed_partitions import dealt_stages
from bapipe.planner.gradient_rings import gradient_sum_time
from bapipe.planner.tuning import DEFAULT_TUNING, Tuning
from bapipe.schedule.replicas import replicated_pipelines

__all__ = ["LOOPED", "REPLICATED", "balanced_hybrids", "copies_of", "numbers_of_copies"]

REPLICATED = ("1f1b-sno", "1f1b-so", "1f1b", "zb", "zb-h1", "zb-h2")
"""schedules of one stage per accelerator that run in several replicas of a pipeline"""
LOOPED = ("interleaved", "zb-v", "v-half", "v-min")
"""those of several, which do so too"""


def balanced_hybrids(
    chain: Chain, hardware: Hardware, microbatches: int, tuning: Tuning = DEFAULT_TUNING
) -> list[tuple[float, tuple[StageChoice, ...]]]:
    """Two or three stages over all accelerators, some replicated, cut so that each replica has as much to do.

    The best by the formula, with its seconds. Only where accelerators are alike and any can send to any: the exact
    partition knows the others' rules.
    """
    cluster = hardware.cluster
    count = len(cluster)
    if len(chain.types) > 1 or cluster.topology == "chain":
        return []
    made = list(_balanced_stages(chain, count, microbatches, tuning))
    least = _least_seconds(chain, made, microbatches)
    scored: list[tuple[float, int]] = []
    for place in sorted(range(len(made)), key=least.__getitem__):
        if scored and len(scored) >= tuning.hybrids_simulated and least[place] > scored[-1][0]:
            break
        longest = max(
            gradient_sum_time(cluster, stage.accelerators, stage_gradients(chain, stage.first, stage.last))
            for stage in made[place]
        )
        bisect.insort(scored, (least[place] + longest, place))
        del scored[tuning.hybrids_simulated :]
    return [(seconds, made[place]) for seconds, place in scored]


def _balanced_stages(
    chain: Chain, count: int, microbatches: int, tuning: Tuning
) -> Iterator[tuple[StageChoice, ...]]:
    """Stages of which each replica has about as much to do."""
    done = np.cumsum(UnitSeconds.of(chain).work[0])
    for replicas in _shares(count, microbatches, tuning):
        wanted = np.cumsum(replicas)[:-1] / count * done[-1]
        near = np.searchsorted(done, wanted)
        for cuts in itertools.product(*([at - 1, at] for at in near.tolist())):
            if cuts[0] < 0 or cuts[-1] >= len(chain) - 1 or list(cuts) != sorted(set(cuts)):
                continue
            yield dealt_stages([cut + 1 for cut in cuts], replicas, len(chain))


def _shares(count: int, microbatches: int, tuning: Tuning) -> Iterator[tuple[int, ...]]:
    """How many accelerators each stage gets; none more than there are micro-batches."""
    most = min(count - 1, microbatches)
    yield from ((first, count - first) for first in range(max(1, count - most), most + 1) if count > 2)
    if count <= tuning.three_stage_accelerators:
        for first, second in itertools.product(range(1, most + 1), repeat=2):
            third = count - first - second
            if 1 <= third <= most and max(first, second, third) > 1:
                yield first, second, third


def _least_seconds(chain: Chain, plans: Sequence[tuple[StageChoice, ...]], microbatches: int) -> list[float]:
    """Of each plan, seconds per global batch by the exact partition's formula (`exact_problem`), links taken as
    free and all-reduces left out."""
    spans = list(dict.fromkeys((stage.first, stage.last) for stages in plans for stage in stages))
    work = dict(zip(spans, stage_seconds(chain, spans).work.tolist(), strict=True)) if spans else {}
    found = []
    for stages in plans:
        own = [work[stage.first, stage.last] for stage in stages]
        rounds = [-(-microbatches // len(stage.accelerators)) - 1 for stage in stages]
        found.append(sum(own) + max(number * each for number, each in zip(rounds, own, strict=True)))
    return found


def numbers_of_copies(cluster: Cluster) -> list[int]:
    """How many pipelines of two stages or more may run as replicas on all accelerators, which must be alike."""
    count = len(cluster)
    alike = len({item.type for item in cluster.accelerators}) == 1 and cluster.topology == "full"
    return [number for number in range(2, count // 2 + 1) if count % number == 0] if alike else []


def copies_of(candidate: Candidate, number: int, cluster: Cluster) -> Iterator[Candidate]:
    """So many replicas of a pipeline that is planned for the first accelerators.

    Replicas of a stage are neighbours; with several nodes also apart, so that each pipeline keeps to few nodes.
    """
    stages, each = candidate.stages, len(cluster) // number
    schedule = replicated_pipelines([candidate.schedule] * number)
    label = f"{candidate.label.partition(',')[0]}, {stage_shape([number] * len(stages))}"
    if candidate.schedule.name in LOOPED:
        label = f"{candidate.label}, {number} replicas"
    several = len({cluster.place(index) for index in range(len(cluster))}) > 1
    for near in (True, False) if several else (True,):
        placed = tuple(
            replace(
                stage,
                accelerators=tuple(
                    own * number + copy if near else own + copy * each
                    for own in stage.accelerators
                    for copy in range(number)
                ),
            )
            for stage in stages
        )
        yield replace(candidate, label=label, stages=placed, schedule=schedule, steps=())
