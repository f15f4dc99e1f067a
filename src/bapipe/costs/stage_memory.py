"""Bytes that one stage needs on its accelerator: the one place that says so."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bapipe.costs.segments import Chain, Floats, part_costs
from bapipe.costs.stage_time import put_off_from
from bapipe.schedule.actions import Schedule

__all__ = ["StageBytes", "counted_twice", "messages_in_workspace", "passed_on", "stage_bytes", "stages_bytes"]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """What a stage holds, apart from gradients and optimizer state, which are copies of its weights."""

    weights: float
    """all of a layer of which it has some time steps"""
    stash: float
    """per live micro-batch: what its backward keeps, what it received for a split layer, and what it sent"""
    delayed: float
    """per micro-batch whose weight gradient is put off, from its input gradient on, in place of the stash"""
    kept: float
    """per live micro-batch where the stage recomputes: its input"""
    received: float
    """one message of the stage before, and below the error that goes back for it"""
    answered: float
    sent: float
    """one message to the stage after, and below the error that comes back for it"""
    returned: float
    workspace: float
    """most that a layer needs for a moment beyond the features of all layers, while those after it hold none; and
    what libraries keep"""
    forward_workspace: float
    """the same of forwards alone, and below of backwards"""
    backward_workspace: float
    first_backward_workspace: float
    """of a backward that makes the gradients: less those of the layers up to the one that is at work"""
    weight_workspace: float
    """of weight gradients that were put off, and below of those that make the gradients"""
    first_weight_workspace: float

    @property
    def buffers(self) -> float:
        """For messages, with one rank before and one after: two received ahead and two being sent, each way."""
        return 2 * (self.received + self.answered + self.sent + self.returned)


def stage_bytes(chain: Chain, first: int, last: int, *, parted: bool = True) -> StageBytes:
    """Of the units `first` to `last`, included. What a stage sends stays until its error has come back.

    `parted`: its backward may be done in two parts, for which it keeps what it received, needed or not.
    """
    span = slice(first, last + 1)
    stash = chain.stash[span]
    sent, returned = float(chain.boundary_forward[last]), float(chain.boundary_backward[last])
    received = float(chain.boundary_forward[first - 1]) if first else 0.0
    answered = float(chain.boundary_backward[first - 1]) if first else 0.0
    more_weights = more_stash = twice = resident = 0.0
    if chain.units[first].start > 0 or chain.units[last].stop < chain.units[last].of:
        parts = part_costs(chain, first, last)
        more_weights, more_stash = parts.weights, parts.stash
        twice = float(counted_twice(chain, first)[last - first])
    before = 0.0 if parted or not first else float(chain.saved_before[first])
    if chain.units[first].start > 0:
        resident = float(chain.resident_input[first] - passed_on(chain, first)[last - first])
        resident = resident if parted else min(resident, float(chain.kept_input[first]))
    return StageBytes(
        weights=float(chain.weight_bytes[span].sum()) + more_weights,
        stash=float(stash.sum()) + resident + sent + more_stash - twice - before,
        delayed=_delayed(chain, first, last, float(stash.sum()) + more_stash + returned),
        kept=float(chain.input_bytes[first]),
        received=received,
        answered=answered,
        sent=sent,
        returned=returned,
        **_workspaces(chain, first, last),
    )


def stages_bytes(chain: Chain, spans: Sequence[tuple[int, int]], schedule: Schedule) -> list[StageBytes]:
    """Of each stage's units, first and last, under this schedule."""
    parted = schedule.parted_stages()
    return [stage_bytes(chain, *span, parted=index in parted) for index, span in enumerate(spans)]


def passed_on(chain: Chain, first: int) -> Floats:
    """Bytes of its input that a stage which begins inside a layer keeps and also sends on, by its last unit.

    That is, of the units from `first` on. What passes all of a stage's layers is taken to be the least that passes
    one of them: values that go past several layers mostly end together.
    """
    layers, _, unfinished = _columns(chain, first)
    least = np.minimum.accumulate(chain.passing[first:])
    before = np.concatenate([[np.inf], least])[np.searchsorted(layers, layers)]
    most = np.where(unfinished, before, least)
    return np.asarray(np.minimum(most, chain.resident_input[first]), dtype=np.float64)


def counted_twice(chain: Chain, first: int) -> Floats:
    """Bytes of the inputs of layers that a stage has in part which its shares of these layers' features have, by
    its last unit: whoever begins inside a layer keeps all of its input, and whoever ends there sends it."""
    layers, share, unfinished = _columns(chain, first)
    kept = np.where(np.isfinite(chain.kept_input[first:]), chain.kept_input[first:], 0.0)
    sums = np.concatenate([[0.0], np.cumsum(share)])
    own = (sums[1:] - sums[np.searchsorted(layers, layers)]) * kept
    begins, inside = chain.units[first].start > 0, layers == layers[0]
    here = own[inside][-1] if begins else 0.0
    found = np.where(inside, own * (begins | unfinished), here + own * unfinished)
    return np.asarray(found, dtype=np.float64)


def _columns(chain: Chain, first: int = 0) -> tuple[Ints, Floats, Bools]:
    """Of each unit from `first` on: its layer, its share of it, and whether the layer goes on after it."""
    layers, share, unfinished = _all_columns(chain)
    return layers[first:], share[first:], unfinished[first:]


@functools.lru_cache(maxsize=16)
def _all_columns(chain: Chain) -> tuple[Ints, Floats, Bools]:
    return (
        np.array([unit.layer for unit in chain.units]),
        np.array([unit.share for unit in chain.units]),
        np.array([unit.stop < unit.of for unit in chain.units]),
    )


def _workspaces(chain: Chain, first: int, last: int) -> dict[str, float]:
    """Most of what a layer needs beyond all stashes, while those of the layers after it are not there, and what
    libraries keep: at any time, in forwards, in backwards, and in those that make the gradients, which all count
    as being there.

    What the last layer sends, or the error for it, is part of what it needs, and counts as a message already.
    Weight gradients that were put off find all there that they need, and make no errors; but a first stage puts
    off its whole backward.
    """
    span = slice(first, last + 1)
    stash, weights = chain.stash[span], np.cumsum(chain.weight_bytes[span])
    each = (chain.unit_workspace, chain.forward_workspace, chain.backward_workspace, chain.weight_workspace)
    needed = np.stack([values[span] for values in each])
    if chain.units[first].start > 0:
        own = sum(unit.layer == chain.units[first].layer for unit in chain.units[span])
        needed[:, :own] -= np.array([values[first - 1] for values in each])[:, None]
    needed[:3] += np.cumsum(stash) - float(stash.sum())
    ends = sum(unit.layer == chain.units[last].layer for unit in chain.units[span])
    needed[:3, -ends:] -= messages_in_workspace(chain)[last]
    if first == 0:
        needed[3] = needed[2]
    most, library = np.maximum(0.0, needed.max(axis=1)), float(chain.library[span].max())
    return {
        "workspace": float(most[0]) + library,
        "forward_workspace": float(most[1]) + library,
        "backward_workspace": float(most[2]) + library,
        "first_backward_workspace": float((needed[2] - weights).max()) + library,
        "weight_workspace": float(most[3]) + library,
        "first_weight_workspace": float((needed[3] - weights).max()) + library,
    }


@functools.lru_cache(maxsize=16)
def messages_in_workspace(chain: Chain) -> Floats:
    """Per unit, bytes that its workspace and the messages have in common where a stage ends with it; 0 inside of a
    layer, where the messages have its input too."""
    both = np.minimum(chain.boundary_forward, chain.boundary_backward)
    return np.where(_columns(chain)[2], 0.0, np.minimum(chain.unit_workspace, both))


def _delayed(chain: Chain, first: int, last: int, whole: float) -> float:
    """What waits for weight gradients that are put off; `whole`: all that the backward needs.

    A first stage has no input gradient, so all of its backward is put off. Part of a layer needs all of its input.
    """
    if first == 0:
        return whole
    apart = int(put_off_from(chain)[first])
    found = float(chain.delayed[apart : last + 1].sum())
    begin, end = chain.units[first], chain.units[last]
    for index, missing in ((first, begin.start / begin.of), (last, 1 - end.stop / end.of)):
        if missing > 0 and chain.delayed[index] > 0 and index >= apart:
            taken = chain.resident_input if chain.units[index].start > 0 else chain.input_bytes
            found += missing * float(taken[index])
    return found
