"""Most bytes that each rank holds at once: weights and gradients, features, messages, and what an action needs.

Where a profile tells forwards from backwards, memory is followed from action to action:

    held during an action = weights, optimizer state and buffers for what is sent
                          + gradients, from the stage's first backward on
                          + features of the micro-batches that are live, this action's included
                          + messages that come before the action ends, for a later one
                          + what the action's layers need for a moment

    and in an update      = weights, gradients, optimizer state and buffers, and what the update makes for a moment

Where it does not, all of these are taken to be at their most at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bapipe.schedule.actions import Kind, Schedule
from bapipe.stage_memory import StageBytes
from bapipe.timeline import Timeline

__all__ = ["message_bytes", "rank_peaks"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_POSTED = 2
"""messages of a wire that a rank takes before they are needed, as the runtime does"""
_COMPUTE = [int(kind) for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.R)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changes:
    """By kind and stage: features that an action adds when it starts and lets go when it ends."""

    start: Floats
    end: Floats


def rank_peaks(
    schedule: Schedule,
    timeline: Timeline,
    needed: Sequence[StageBytes],
    *,
    copies: int,
    update_copies: int,
    recompute: Sequence[bool],
    phases_told: bool,
) -> list[float]:
    """Peak bytes of each rank; `copies` of the weights are weights, gradients and optimizer state, and
    `update_copies` those and what an update makes for a moment."""
    versions = schedule.weight_versions or (1,) * len(needed)
    weights = [item.weights * (copies + versions[index] - 1) for index, item in enumerate(needed)]
    sending, receiving = _messages(schedule, needed)
    features = timeline.peak_bytes_by_rank(
        [item.stash for item in needed], [item.kept for item in needed], [item.delayed for item in needed]
    )
    waiting = _waiting(timeline, needed) if phases_told else None
    changes = _changes(needed, recompute)
    peaks = []
    for rank in range(schedule.num_ranks):
        stages = schedule.stages_of(rank)
        held = sum(weights[stage] + sending[stage] for stage in stages)
        own = _in_order(timeline, rank)
        if waiting is not None and len(own) and (timeline.lanes[own] == timeline.lanes[own[0]]).all():
            update = (update_copies - copies) * sum(needed[stage].weights for stage in stages)
            peaks.append(held + max(update, _followed(schedule, timeline, own, needed, changes, waiting[rank])))
        else:
            workspace = max((needed[stage].workspace for stage in stages), default=0.0)
            peaks.append(held + features[rank] + workspace + sum(receiving[stage] for stage in stages))
    return peaks


def message_bytes(schedule: Schedule, needed: Sequence[StageBytes]) -> list[float]:
    """By stage, the most that messages take on one of its ranks, sent and received ones."""
    return [sum(both) for both in zip(*_messages(schedule, needed), strict=True)]


def _messages(schedule: Schedule, needed: Sequence[StageBytes]) -> tuple[list[float], list[float]]:
    """By stage, bytes of those that one of its ranks sends and of those that it receives ahead, two of each wire.

    Micro-batches are dealt to replicas in turn, so a rank of r replicas has s / gcd(r, s) wires to s others.
    """
    counts = [len(ranks) for ranks in schedule.placement]
    wires = [after // math.gcd(own, after) for own, after in itertools.pairwise(counts)] + [0]
    back = [0] + [before // math.gcd(own, before) for before, own in itertools.pairwise(counts)]
    sending = [
        2 * (after * item.sent + before * item.answered)
        for item, before, after in zip(needed, back, wires, strict=True)
    ]
    receiving = [
        _POSTED * (after * item.returned + before * item.received)
        for item, before, after in zip(needed, back, wires, strict=True)
    ]
    return sending, receiving


def _changes(needed: Sequence[StageBytes], recompute: Sequence[bool]) -> _Changes:
    stash, kept, delayed = np.array([(item.stash, item.kept, item.delayed) for item in needed]).T
    held = np.where(recompute, kept, stash)
    start, end = np.zeros((2, len(Kind), len(needed)))
    start[Kind.F], start[Kind.R] = held, stash - held
    end[Kind.B], end[Kind.I], end[Kind.W] = -stash, delayed - stash, -delayed
    return _Changes(start=start, end=end)


def _followed(
    schedule: Schedule,
    timeline: Timeline,
    own: Ints,
    needed: Sequence[StageBytes],
    changes: _Changes,
    waiting: Floats,
) -> float:
    """The most of one rank beside its weights; `own` are its actions in order, all of one lane."""
    kinds, stages = timeline.kinds[own], timeline.stages[own]
    ends = changes.end[kinds, stages]
    features = np.cumsum(changes.start[kinds, stages]) + np.cumsum(ends) - ends
    besides = np.zeros((len(Kind), len(needed)))
    for stage, item in enumerate(needed):
        besides[[Kind.F, Kind.R], stage] = item.forward_workspace
        besides[[Kind.B, Kind.I, Kind.W], stage] = item.backward_workspace
    total = features + besides[kinds, stages] + waiting
    for stage in schedule.stages_of(int(timeline.ranks[own[0]])):
        _without_gradients(total, kinds, stages == stage, needed[stage], always=not schedule.flushes)
    return float(total.max())


def _without_gradients(
    total: Floats, kinds: Ints, here: NDArray[np.bool_], item: StageBytes, *, always: bool
) -> None:
    """Take off what is not there yet: a stage's first backward makes its gradients, from the last layer on.

    `always`: every backward does, as each is followed by its update.
    """
    makes = np.flatnonzero(here & ((kinds == Kind.B) | (kinds == Kind.W)))
    if not len(makes):
        return
    total[: makes[0]] -= item.weights
    less = item.backward_workspace - item.first_backward_workspace
    total[makes if always else makes[:1]] -= less


def _waiting(timeline: Timeline, needed: Sequence[StageBytes]) -> list[Floats]:
    """By rank, for each of its compute actions in order, bytes of messages that come before it ends, for later."""
    transfers, consumers = timeline.transfers, timeline.consumers()
    source = transfers.source
    sizes = np.array([[item.answered for item in needed], [item.sent for item in needed]])
    size = sizes[(timeline.kinds[source] == Kind.F).astype(np.int64), timeline.stages[source]]
    place = np.zeros(len(timeline.kinds), np.int64)
    found = []
    for rank in range(timeline.num_ranks):
        own = _in_order(timeline, rank)
        place[own] = np.arange(len(own))
        coming = np.flatnonzero((transfers.to_rank == rank) & (consumers >= 0))
        coming = coming[np.argsort(place[consumers[coming]], kind="stable")]
        taken = place[consumers[coming]]
        wires = timeline.ranks[source[coming]] * len(Kind) + timeline.kinds[source[coming]]
        there = _there(transfers.arrival[coming], timeline.start[own][taken], wires)
        order = np.argsort(there, kind="stable")
        came = np.concatenate([[0.0], np.cumsum(size[coming][order])])
        gone = np.concatenate([[0.0], np.cumsum(size[coming])])
        all_came = came[np.searchsorted(there[order], timeline.end[own], side="left")]
        all_gone = gone[np.searchsorted(taken, np.arange(len(own)), side="right")]
        found.append(np.maximum(0.0, all_came - all_gone))
    return found


def _there(arrival: Floats, taken: Floats, wires: Ints) -> Floats:
    """When each message is there: no more of a wire than are posted, the next when one is taken."""
    there = arrival.copy()
    for wire in np.unique(wires):
        own = np.flatnonzero(wires == wire)
        there[own[_POSTED:]] = np.maximum(there[own[_POSTED:]], taken[own[:-_POSTED]])
    return there


def _in_order(timeline: Timeline, rank: int) -> Ints:
    """A rank's compute actions in the order of time."""
    own = np.flatnonzero((timeline.ranks == rank) & np.isin(timeline.kinds, _COMPUTE))
    return own[np.argsort(timeline.start[own], kind="stable")]
