"""Pipelines of one accelerator type each, all cut alike, that take micro-batches by their speed.

On a mixed cluster a pipeline over several types gives each type as much of the model as it has speed, and the
fastest type may lack memory for its share. Pipelines that each keep to one type have even stages; the faster ones
take more micro-batches of a global batch instead, and all sum their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bapipe.costs.segments import Chain
from bapipe.hardware.cluster import Cluster
from bapipe.planner.candidate import Candidate, Hardware, StageChoice
from bapipe.planner.candidate_costs import seconds_of
from bapipe.planner.evaluate import Evaluation
from bapipe.planner.pipelines import Family, build
from bapipe.planner.tuning import DEFAULT_TUNING, Tuning
from bapipe.schedule.dealing import Dealing, deal_by_speed, deal_evenly, dealt_counts
from bapipe.schedule.generators import capped
from bapipe.schedule.replicas import replicated_pipelines

__all__ = [
    "TypedPipelines",
    "copies_allowed",
    "deal",
    "pipeline_ends",
    "pipelines_of_types",
    "stage_pace",
    "typed_candidate",
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TypedPipelines:
    """As many accelerators of one type in each of several pipelines, in equal `copies`."""

    copies: int
    depth: int
    """accelerators of a pipeline"""
    types: tuple[str, ...]
    """of each pipeline of a copy"""
    apart: tuple[tuple[tuple[int, ...], ...], ...]
    """[pipeline, copy, place] accelerators, those of a pipeline next to each other"""
    near: tuple[tuple[tuple[int, ...], ...], ...]
    """likewise, where those at one place of all pipelines of a type are next to each other instead"""

    def __len__(self) -> int:
        return self.copies * self.depth * len(self.types)


def copies_allowed(numbers: Mapping[str, int], microbatches: int) -> list[int]:
    """In how many copies there may be so many pipelines of each type: most first."""
    most = min(max(numbers.values()), microbatches)
    return [copies for copies in range(most, 0, -1) if microbatches % copies == 0]


def pipelines_of_types(
    cluster: Cluster, depth: int, numbers: Mapping[str, int], microbatches: int
) -> Iterator[TypedPipelines]:
    """At most so many pipelines of each type, in every number of copies that divides the micro-batches.

    The most copies first: they have the fewest pipelines each. With one copy no pipeline is left over.
    """
    own = {
        name: [index for index, item in enumerate(cluster.accelerators) if item.type == name] for name in numbers
    }
    for copies in copies_allowed(numbers, microbatches):
        types, apart, near = [], [], []
        for name, number in numbers.items():
            each = number // copies
            for first in range(each):
                rows = [copy * each + first for copy in range(copies)]
                types.append(name)
                apart.append(tuple(tuple(own[name][row * depth : (row + 1) * depth]) for row in rows))
                near.append(
                    tuple(tuple(own[name][place * copies * each + row] for place in range(depth)) for row in rows)
                )
        if types:
            yield TypedPipelines(
                copies=copies, depth=depth, types=tuple(types), apart=tuple(apart), near=tuple(near)
            )


def deal(
    seconds: Mapping[str, float], fill: Mapping[str, float], pipelines: TypedPipelines, microbatches: int
) -> Dealing | None:
    """So many micro-batches of one copy so that its pipelines end together; None where one would have none.

    Of each type what a micro-batch more takes, and what is taken besides.
    """
    types = pipelines.types
    dealt = deal_by_speed([seconds[name] for name in types], microbatches, fill=[fill[name] for name in types])
    counts = dealt_counts(dealt, len(types), microbatches)
    if min(counts) == 0:
        return None
    return deal_evenly(counts) if dealt else ()


def typed_candidate(
    chain: Chain,
    stages: Sequence[StageChoice],
    family: Family | None,
    dealing: Dealing,
    *,
    pipelines: TypedPipelines,
    microbatches: int,
    hardware: Hardware,
    near: bool = False,
    tuning: Tuning = DEFAULT_TUNING,
) -> Candidate:
    """These pipelines, each of the given stages, with so many micro-batches of each copy.

    A stage's only accelerator is its place in a pipeline. Without a family of schedules it is data parallelism.
    """
    cluster, replicas = hardware.cluster, len(pipelines.types)
    counts = dealt_counts(dealing, replicas, microbatches)
    placed = pipelines.near if near else pipelines.apart
    if family is None:
        schedule = capped(
            1,
            microbatches,
            [1 if dealing else replicas],
            name="data-parallel",
            replicas=[replicas],
            dealing=[dealing] if dealing else None,
        )
        label = "data parallelism"
    else:
        made = []
        for own, count in zip(placed, counts, strict=True):
            part = replace(hardware, cluster=cluster.part([cluster.accelerators[index] for index in own[0]]))
            made.append(build(chain, stages, family, count, part, tuning))
        schedule, label = replicated_pipelines([own.schedule for own in made], dealing), made[0].label
    wide = tuple(
        replace(
            stage,
            accelerators=tuple(
                own[copy][stage.accelerators[0]] for own in placed for copy in range(pipelines.copies)
            ),
        )
        for stage in stages
    )
    return Candidate(
        label=f"{label}, {_replicas_in_words(pipelines, counts)}",
        chain=chain,
        stages=wide,
        schedule=schedule,
        copies=pipelines.copies,
    )


def _replicas_in_words(pipelines: TypedPipelines, counts: Sequence[int]) -> str:
    """How many replicas are of which type, with about how many micro-batches each."""
    found = []
    for name in dict.fromkeys(pipelines.types):
        own = [count for kind, count in zip(pipelines.types, counts, strict=True) if kind == name]
        each = str(min(own)) if min(own) == max(own) else f"{min(own)} to {max(own)}"
        found.append(f"{len(own) * pipelines.copies} replicas of {name} with {each} micro-batches")
    return " and ".join(found)


def stage_pace(
    chain: Chain, stages: Sequence[StageChoice], cluster: Cluster, types: Sequence[str]
) -> tuple[dict[str, float], dict[str, float]]:
    """Of each type what a pipeline takes for a micro-batch more, by its longest stage, and to fill and drain."""
    each, fill = {}, {}
    for name in types:
        first = next(index for index, item in enumerate(cluster.accelerators) if item.type == name)
        alone = [replace(stage, accelerators=(first,)) for stage in stages]
        seconds = seconds_of(chain, alone, cluster)
        again = np.array([stage.recompute for stage in stages])
        work = seconds.work + again * seconds.forward
        each[name], fill[name] = float(work.max()), float(work.sum() - work.max())
    return each, fill


def pipeline_ends(evaluation: Evaluation, pipelines: TypedPipelines) -> dict[str, float]:
    """When the last pipeline of each type has done its micro-batches."""
    timeline, replicas = evaluation.timeline, len(pipelines.types)
    simulated = evaluation.schedule.num_ranks // evaluation.candidate.schedule.num_ranks
    busy = timeline.microbatches >= 0
    own = timeline.ranks[busy] // simulated % replicas
    ends = np.zeros(replicas)
    np.maximum.at(ends, own, timeline.end[busy])
    found: dict[str, float] = {}
    for name, end in zip(pipelines.types, ends.tolist(), strict=True):
        found[name] = max(end, found.get(name, 0.0))
    return found
