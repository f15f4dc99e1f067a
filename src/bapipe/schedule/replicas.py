"""Replicas of whole pipelines (PP × DP), whose stages sum their gradients.

two of 2 stages, M = 4      stage 0: ranks 0 and 1, stage 1: ranks 2 and 3
0  F0 F2 …                  the first has the even micro-batches,
1  F1 F3 …                  the second the odd ones
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from bapipe.errors import BaPipeError
from bapipe.schedule.actions import Lane, Schedule
from bapipe.schedule.dealing import (
    Dealing,
    Ints,
    copied_dealing,
    dealt_counts,
    least_shared,
    own_microbatches,
    require_dealing,
)

__all__ = ["first_replica", "replicated", "replicated_pipelines"]


def replicated_pipelines(pipelines: Sequence[Schedule], dealing: Dealing = ()) -> Schedule:
    """As many replicas of a pipeline, each on ranks of its own; micro-batches are dealt to them in turn, or so.

    In turn, the first ones have a micro-batch more where these do not go round. What is on rank i of a pipeline is
    on the ranks i·r to i·r + r − 1; a stage that has replicas of its own then has r times as many, and deals to
    those of each pipeline as that does, which must then all be alike.
    """
    first, count = pipelines[0], len(pipelines)
    total = sum(item.num_microbatches for item in pipelines)
    dealt = list(dealt_counts(dealing, count, total))
    if dealing and max(map(len, first.placement)) > 1:
        raise BaPipeError(f"{first.name} has replicas of its own; deal its micro-batches in turn")
    if [item.num_microbatches for item in pipelines] != dealt or any(
        (item.name, item.placement) != (first.name, first.placement) for item in pipelines
    ):
        how = "as the dealing has it" if dealing else "dealt in turn"
        raise BaPipeError(f"replicas of a pipeline are of one name and shape, with micro-batches {how}")
    if first.dealing is not None and any(
        (item.dealing, item.num_microbatches) != (first.dealing, first.num_microbatches) for item in pipelines
    ):
        raise BaPipeError(f"replicas of {first.name} that deal micro-batches to replicas of their own are alike")
    own = [own_microbatches(dealing, count, replica, total) for replica in range(count)]
    lanes = [
        _dealt(lane, count, replica, own[replica]) for replica, item in enumerate(pipelines) for lane in item.lanes
    ]
    caps = [
        least_shared(dealing, count, max(held))
        for held in zip(*(item.caps or () for item in pipelines), strict=True)
    ]
    return replace(
        first,
        num_microbatches=total,
        placement=_placed(first, count),
        lanes=tuple(sorted(lanes, key=lambda lane: lane.rank)),
        caps=tuple(caps) or None,
        dealing=(dealing,) * first.num_stages if dealing else _inner_dealing(first, count),
    )


def _inner_dealing(pipeline: Schedule, count: int) -> tuple[Dealing, ...] | None:
    """How the stages of so many replicas deal where the pipeline's own do not deal in turn."""
    if pipeline.dealing is None:
        return None
    known = {dealing: copied_dealing(dealing, count) for dealing in pipeline.dealing}
    return tuple(known[dealing] for dealing in pipeline.dealing)


def first_replica(pipeline: Schedule, count: int) -> Schedule:
    """What `replicated_pipelines` makes of so many alike, but only the lanes of the first.

    The others have the same actions on the next ranks, with the next micro-batches.
    """
    return replace(
        pipeline,
        num_microbatches=count * pipeline.num_microbatches,
        placement=_placed(pipeline, count),
        lanes=tuple(
            _dealt(lane, count, 0, own_microbatches((), count, 0, count * pipeline.num_microbatches))
            for lane in pipeline.lanes
        ),
        caps=None if pipeline.caps is None else tuple(cap * count for cap in pipeline.caps),
        dealing=_inner_dealing(pipeline, count),
    )


def _placed(pipeline: Schedule, count: int) -> tuple[tuple[int, ...], ...]:
    """The ranks of each stage, of all replicas."""
    return tuple(
        tuple(rank * count + replica for rank in ranks for replica in range(count)) for ranks in pipeline.placement
    )


def _dealt(lane: Lane, count: int, replica: int, own: Ints) -> Lane:
    """A lane of one of so many replicas, on its rank and with its micro-batches."""
    microbatches = np.where(lane.microbatches < 0, -1, own[lane.microbatches])
    return Lane(lane.rank * count + replica, lane.kinds, lane.stages, microbatches, lane.name)


def replicated(
    name: str,
    order: Callable[[int], Schedule],
    num_microbatches: int,
    replicas: Sequence[int] | None,
    dealing: Dealing = (),
) -> Schedule:
    """Zero-bubble orders of so many micro-batches, in replicas of the pipeline where there are any."""
    count = max(replicas or (1,))
    if count == 1:
        return order(num_microbatches)
    if min(replicas or (1,)) != count:
        raise BaPipeError(f"{name} runs with as many replicas of each stage; make --replicas alike")
    if num_microbatches < count:
        raise BaPipeError(
            f"{count} replicas need as many micro-batches, got {num_microbatches}; raise --micro-batches"
        )
    require_dealing(dealing, count, num_microbatches, stage=0)
    return replicated_pipelines([order(own) for own in dealt_counts(dealing, count, num_microbatches)], dealing)
