"""Most bytes that each rank holds at once: weights and gradients, activations, messages and workspace.

Where a profile tells forwards from backwards, memory is followed from action to action:

    held during an action    = weights, their casts, optimizer state and buffers for what is sent
                             + gradients, from the stage's first backward on
                             + saved activations of the in-flight micro-batches, this action's included
                             + messages that come before the action ends, for a later one
                             + the workspace of the action's layers

    and in an optimizer step = weights, gradients, optimizer state and buffers, and the step's workspace

Where it does not, all of these are taken to be at their most at once.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bapipe.costs.stage_memory import StageBytes
from bapipe.schedule.actions import Kind, Schedule
from bapipe.simulator.timeline import Timeline

__all__ = ["PeakBytes", "message_bytes", "rank_peaks"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_POSTED = 2
"""messages of a wire that a rank takes before they are needed, as the runtime does"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakBytes:
    """What is on a rank when its memory is fullest."""

    weights: float
    """every version that the schedule keeps, and what autocast casts of them while a global batch runs"""
    gradients: float
    """those that are there"""
    optimizer: float
    """its state"""
    activations: float
    """of in-flight micro-batches, and of those that wait for weight gradients"""
    buffers: float
    """messages that are sent, and that came for later"""
    workspace: float
    """of the layer at work or of the optimizer step; and what libraries keep"""

    @property
    def total(self) -> float:
        parts = (self.weights, self.gradients, self.optimizer, self.activations, self.buffers, self.workspace)
        return sum(parts)


def rank_peaks(
    schedule: Schedule,
    timeline: Timeline,
    needed: Sequence[StageBytes],
    *,
    copies: float | Sequence[float],
    update_copies: float | Sequence[float],
    phases_known: bool,
) -> list[PeakBytes]:
    """The peak of each rank; `copies` of what is trained are weights, gradients and optimizer state, and
    `update_copies` those and the workspace of an optimizer step, of all stages or of each. Frozen weights are
    there once."""
    held, stepping = (
        [float(item)] * len(needed) if isinstance(item, int | float) else list(item)
        for item in (copies, update_copies)
    )
    versions = schedule.weight_versions or (1,) * len(needed)
    sending, receiving = _messages(schedule, needed)
    parts = (
        [item.saved_activations for item in needed],
        [item.kept for item in needed],
        [item.delayed for item in needed],
    )
    moments = _fullest_moments(schedule, timeline, needed) if phases_known else [None] * schedule.num_ranks
    activations = timeline.peak_bytes_by_rank(*parts) if None in moments else []
    peaks = []
    for rank, moment in enumerate(moments):
        stages = schedule.stages_of(rank)
        trained, sent = (
            sum(values) for values in zip(*((needed[s].trained, sending[s]) for s in stages), strict=True)
        )
        casts = sum(needed[stage].casts for stage in stages)
        most = PeakBytes(
            weights=sum(needed[stage].static(versions[stage]) for stage in stages),
            gradients=trained,
            optimizer=sum((held[stage] - 2) * needed[stage].trained for stage in stages),
            activations=0.0,
            buffers=sent,
            workspace=sum((stepping[stage] - held[stage]) * needed[stage].trained for stage in stages),
        )
        if moment is not None:
            inflight, workspace, gradients, waiting = moment
            if inflight + workspace + gradients + waiting + casts > most.workspace:
                # A first backward that needs less than the gradients it has yet to make.
                gradients += trained + min(0.0, workspace)
                most = replace(
                    most,
                    weights=most.weights + casts,
                    activations=inflight,
                    gradients=gradients,
                    buffers=sent + waiting,
                    workspace=max(0.0, workspace),
                )
        else:
            most = replace(
                most,
                weights=most.weights + casts,
                activations=activations[rank],
                buffers=sent + sum(receiving[stage] for stage in stages),
                workspace=max((needed[stage].workspace for stage in stages), default=0.0),
            )
        peaks.append(most)
    return peaks


def _fullest_moments(
    schedule: Schedule, timeline: Timeline, needed: Sequence[StageBytes]
) -> list[tuple[float, float, float, float] | None]:
    """Of each rank, during the action when it holds most: its saved activations, the action's workspace, the
    gradients that are not there yet (below 0), and messages that came for later; None for a rank with several
    lanes or nothing to do, whose actions are not followed."""
    orders = timeline.compute_by_rank()
    saved, kept, delayed = zip(
        *((item.saved_activations, item.kept, item.delayed) for item in needed), strict=True
    )
    change, besides = timeline.activation_changes(np.array(saved), kept, delayed), _besides(needed)
    found = list[tuple[float, float, float, float] | None]()
    for own, coming in zip(orders, _coming(timeline, orders), strict=True):
        if not len(own) or (timeline.lanes[own] != timeline.lanes[own[0]]).any():
            found.append(None)
            continue
        waiting = _waiting(timeline, own, coming, needed)
        followed = _followed(timeline, own, needed, change, besides, always=not schedule.flushes)
        at = int((followed.sum(axis=0) + waiting).argmax())
        inflight, workspace, gradients = followed[:, at].tolist()
        found.append((inflight, workspace, gradients, float(waiting[at])))
    return found


def message_bytes(schedule: Schedule, needed: Sequence[StageBytes]) -> list[float]:
    """By stage, the most that messages take on one of its ranks, sent and received ones."""
    return [sum(both) for both in zip(*_messages(schedule, needed), strict=True)]


def _messages(schedule: Schedule, needed: Sequence[StageBytes]) -> tuple[list[float], list[float]]:
    """By stage, bytes of those that one of its ranks sends and of those that it receives ahead, two of each wire.

    Where micro-batches are dealt to replicas in turn a rank of r replicas has s / gcd(r, s) wires to s others.
    What a stage hands to the next on the same rank is not sent: one of each way is held until it is taken.
    """
    counts = [len(ranks) for ranks in schedule.placement]
    local = [one == other for one, other in itertools.pairwise(schedule.placement)]
    pairs = list(zip(local, itertools.pairwise(counts), strict=True))
    wires = [0 if same else after // math.gcd(own, after) for same, (own, after) in pairs] + [0]
    back = [0] + [0 if same else before // math.gcd(own, before) for same, (before, own) in pairs]
    if schedule.dealing is not None:
        met = [set(schedule.meetings(boundary)) for boundary in range(len(counts) - 1)]
        wires = [max(Counter(ahead for ahead, _ in own).values()) for own in met] + [0]
        back = [0] + [max(Counter(behind for _, behind in own).values()) for own in met]
    sending = [
        2 * (after * item.sent + before * item.answered) + onward * item.sent + backward * item.answered
        for item, before, after, onward, backward in zip(
            needed, back, wires, [*local, False], [False, *local], strict=True
        )
    ]
    receiving = [
        _POSTED * (after * item.returned + before * item.received)
        for item, before, after in zip(needed, back, wires, strict=True)
    ]
    return sending, receiving


def _besides(needed: Sequence[StageBytes]) -> Floats:
    """By kind of action and stage, bytes of its workspace."""
    found = np.zeros((len(Kind), len(needed)))
    found[[Kind.F, Kind.R]] = [item.forward_workspace for item in needed]
    found[[Kind.B, Kind.I]] = [item.backward_workspace for item in needed]
    found[Kind.W] = [item.weight_workspace for item in needed]
    return found


def _followed(
    timeline: Timeline, own: Ints, needed: Sequence[StageBytes], change: Floats, besides: Floats, *, always: bool
) -> Floats:
    """In each of a rank's actions, `own`: its saved activations, the action's workspace, and, below 0, the
    gradients that are not there yet.

    A stage's first backward makes its gradients, from the last layer on; `always`: every backward does, as each is
    followed by its optimizer step.
    """
    kinds, stages = timeline.kinds[own], timeline.stages[own]
    changes, forward = change[kinds, stages], (kinds == Kind.F) | (kinds == Kind.R)
    after = np.cumsum(changes)
    inflight = np.where(forward, after, after - changes)  # the others let go when they end
    workspace, missing = besides[kinds, stages], np.zeros(len(own))
    makes = (kinds == Kind.B) | (kinds == Kind.W)
    for stage in set(stages.tolist()):
        makers, item = np.flatnonzero(makes & (stages == stage)), needed[stage]
        if len(makers):
            missing[: makers[0]] -= item.trained
            first = makers if always else makers[:1]
            anew = (item.first_backward_workspace, item.first_weight_workspace)
            workspace[first] = np.where(kinds[first] == Kind.B, *anew)
    return np.stack([inflight, workspace, missing])


def _coming(timeline: Timeline, orders: Sequence[Ints]) -> list[tuple[Ints, Ints]]:
    """For each rank the transfers that come to it, in the order in which its actions take them, and the places of
    these among the rank's actions, `orders`."""
    consumers = timeline.consumers()
    transfers = np.flatnonzero(consumers >= 0)
    feeding = np.full(len(timeline.kinds), -1)
    feeding[consumers[transfers]] = transfers  # one at most for each action
    fed = [feeding[own] for own in orders]
    return [(own[own >= 0], np.flatnonzero(own >= 0)) for own in fed]


def _waiting(timeline: Timeline, own: Ints, coming: tuple[Ints, Ints], needed: Sequence[StageBytes]) -> Floats:
    """For each of a rank's actions, `own`, bytes of messages that come before it ends, for a later one."""
    transfers, (coming_ones, taken) = timeline.transfers, coming
    source = transfers.source[coming_ones]
    kinds = timeline.kinds[source]
    sizes = np.array([(item.answered, item.sent) for item in needed])
    size = sizes[timeline.stages[source], (kinds == Kind.F).astype(np.int64)]
    wires = timeline.ranks[source] * len(Kind) + kinds
    there = _there(transfers.arrival[coming_ones], timeline.start[own][taken], wires)
    order = np.argsort(there, kind="stable")
    came = np.concatenate([[0.0], np.cumsum(size[order])])
    gone = np.concatenate([[0.0], np.cumsum(size)])
    all_came = came[np.searchsorted(there[order], timeline.end[own], side="left")]
    all_gone = gone[np.searchsorted(taken, np.arange(len(own)), side="right")]
    return np.asarray(np.maximum(0.0, all_came - all_gone), dtype=np.float64)


def _there(arrival: Floats, taken: Floats, wires: Ints) -> Floats:
    """When each message is there: no more of a wire than are posted, the next when one is taken."""
    there = arrival.copy()
    for wire in np.unique(wires):
        own = np.flatnonzero(wires == wire)
        there[own[_POSTED:]] = np.maximum(there[own[_POSTED:]], taken[own[:-_POSTED]])
    return there
