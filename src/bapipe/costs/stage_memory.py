"""Bytes that one stage needs on its accelerator: the one place that says so.

A stage runs the units [first, last] of a chain. `stage_bytes` weighs one, `every_run_bytes` all runs of units at
once, by the same code. Searches that add up unit after unit go by `UnitBytes`, which differs as it says; what they
find is weighed again. When it is all there together is in `bapipe.costs.peak_memory`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from bapipe.costs.held_weights import copies_on_the_same_rank, held_weights
from bapipe.costs.segments import Chain, Floats
from bapipe.costs.stage_time import deferred_from, missing_shares
from bapipe.schedule.actions import Schedule

__all__ = [
    "HeldBytes",
    "StageBytes",
    "UnitBytes",
    "every_run_bytes",
    "every_stage_bytes",
    "needed_beyond",
    "stage_bytes",
    "stages_bytes",
]

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Amount = TypeVar("Amount", float, Floats)
_PHASES = ("forward_workspace", "backward_workspace", "weight_workspace")
_MESSAGES = 0.02
"""share of the memory up to which `UnitBytes` counts messages"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldBytes(Generic[Amount]):
    """What a stage holds, its schedule apart; gradients and optimizer state are copies of its trained weights."""

    weights: Amount
    """all of a layer of which it has some time steps, and a copy of what it shares with another stage"""
    trained: Amount
    """of these, the ones that have a gradient and optimizer state; the others are frozen"""
    casts: Amount
    """copies of its weights in another dtype, which autocast keeps from the first forward of a global batch to the
    last backward"""
    saved_activations: Amount
    """per in-flight micro-batch: what its backward keeps, what it received for a split layer, and what it sent"""
    delayed: Amount
    """per micro-batch whose weight gradient is deferred, from its input gradient on, in place of what is saved"""
    kept: Amount
    """per in-flight micro-batch where the stage recomputes: its input"""
    buffers: Amount
    """for messages, with one rank before and one after: two received ahead and two being sent, each way"""
    workspace: Amount
    """most workspace of a layer beyond the activations of all layers, while those after it hold none; and
    what libraries keep"""

    def static(self, copies: float) -> Amount:
        """Weights, gradients and optimizer state, which are `copies` of what is trained; frozen weights once."""
        return copies * self.trained + (self.weights - self.trained)

    def each(self, *, recompute: bool) -> Amount:
        """Of one in-flight micro-batch."""
        return self.kept if recompute else self.saved_activations

    def fixed(self, copies: float, *, recompute: bool) -> Amount:
        """All but the in-flight micro-batches; `copies` as in `static`.

        A stage that recomputes has the activations of the one at work besides.
        """
        always = self.static(copies) + self.casts + self.buffers + self.workspace
        return always + self.saved_activations if recompute else always

    def held(self, copies: float, inflight: int, waiting: int = 0, *, recompute: bool = False) -> Amount:
        """All at its most at once: so many micro-batches in flight, so many that wait for weight gradients."""
        return (
            self.fixed(copies, recompute=recompute)
            + inflight * self.each(recompute=recompute)
            + waiting * self.delayed
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes(HeldBytes[float]):
    """And what is there only at times."""

    received: float
    """one message of the stage before, and below the error that goes back for it"""
    answered: float
    sent: float
    """one message to the stage after, and below the error that comes back for it"""
    returned: float
    forward_workspace: float
    """workspace of forwards alone, and below of backwards"""
    backward_workspace: float
    first_backward_workspace: float
    """of a backward that makes the gradients: less those of the layers up to the one that is at work"""
    weight_workspace: float
    """of deferred weight gradients, and below of those that make the gradients"""
    first_weight_workspace: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitBytes:
    """What each unit holds, one entry per unit: the coarser rule, of sums over units.

    An approximation of `stage_bytes`: it leaves out what a stage keeps of what it sends, what it holds on top at
    an end inside a layer, and copies of weights that it shares with another stage; it takes the largest unit's
    workspace to come on top of all activations, and two of the largest messages to be under way, as far as those
    are little.
    """

    weights: Floats
    trained: Floats
    casts: Floats
    saved_activations: Floats
    delayed: Floats
    inputs: Floats
    crossing: tuple[Floats, Floats]
    """a message after the unit, and the error for it"""
    workspace: float

    @classmethod
    def of(cls, chain: Chain) -> UnitBytes:
        """Of all units of the chain."""
        return cls(
            weights=chain.weight_bytes,
            trained=chain.trainable_bytes,
            casts=chain.weight_casts,
            saved_activations=chain.saved_activations,
            delayed=chain.delayed,
            inputs=chain.input_bytes,
            workspace=chain.workspace,
            crossing=(chain.boundary_forward, chain.boundary_backward),
        )

    def overhead(self, capacity: float) -> float:
        """Workspace and messages, on an accelerator of so much memory."""
        return self.workspace + min(2 * float(np.max(self.crossing)), _MESSAGES * capacity)

    def as_inflight(self, inflight: int, waiting: int) -> int:
        """Micro-batches as if all were in flight: one that waits for its weight gradients counts as it weighs."""
        whole = float(self.saved_activations.sum())
        if not waiting or whole <= 0:
            return inflight
        return inflight + math.ceil(waiting * float(self.delayed.sum()) / whole)

    def always(self, copies: float) -> Floats:
        """Of each unit, weights, gradients and optimizer state, `copies` of what is trained, and casts."""
        return copies * self.trained + (self.weights - self.trained) + self.casts

    def held(self, first: int, last: int, copies: float, inflight: int) -> float:
        """Of the units `first` to `last`, without messages."""
        own = slice(first, last + 1)
        return (
            float(self.always(copies)[own].sum())
            + inflight * float(self.saved_activations[own].sum())
            + self.workspace
        )


@functools.lru_cache(maxsize=16_384)
def stage_bytes(chain: Chain, first: int, last: int, *, parted: bool = True) -> StageBytes:
    """Of the units `first` to `last`, included. What a stage sends stays until its error has come back.

    `parted`: its backward may be done in two parts, for which it keeps what it received, needed or not.
    """
    (held, spaces), at = _from_first(chain, first, parted=parted), last - first
    ahead, back = chain.boundary_forward, chain.boundary_backward
    return StageBytes(
        weights=float(held.weights[at]),
        trained=float(held.trained[at]),
        casts=float(held.casts[at]),
        saved_activations=float(held.saved_activations[at]),
        delayed=float(held.delayed[at]),
        kept=float(chain.input_bytes[first]),
        buffers=float(held.buffers[at]),
        workspace=float(held.workspace[at]),
        received=float(ahead[first - 1]) if first else 0.0,
        answered=float(back[first - 1]) if first else 0.0,
        sent=float(ahead[last]),
        returned=float(back[last]),
        **{name: float(values[at]) for name, values in spaces.items() if name != "unit_workspace"},
    )


@functools.lru_cache(maxsize=256)
def _from_first(chain: Chain, first: int, *, parted: bool) -> tuple[HeldBytes[Floats], dict[str, Floats]]:
    """Of every stage that begins with the unit `first`: searches ask for many that differ in their last unit."""
    return _by_last(chain, first, len(chain) - 1, _PHASES, parted=parted)


def stages_bytes(chain: Chain, spans: Sequence[tuple[int, int]], schedule: Schedule) -> list[StageBytes]:
    """Of each stage's units, first and last, under this schedule.

    Stages of one rank have one copy of the weights that they share, which counts where it stands first.
    """
    parted = schedule.parted_stages()
    found = [stage_bytes(chain, *span, parted=index in parted) for index, span in enumerate(spans)]
    for index, less in copies_on_the_same_rank(chain, spans, schedule.placement).items():
        held = {name: getattr(found[index], name) - bytes_ for name, bytes_ in less.items()}
        found[index] = replace(found[index], **held)
    return found


def every_run_bytes(chain: Chain) -> HeldBytes[Floats]:
    """Of every run of units, [first, last]; 0 where last < first."""
    units = len(chain)
    found = {
        name: np.zeros((units, units))
        for name in ("weights", "trained", "casts", "saved_activations", "delayed", "buffers", "workspace")
    }
    for first in range(units):
        own, _ = _by_last(chain, first, units - 1)
        for name, values in found.items():
            values[first, first:] = getattr(own, name)
    return HeldBytes(kept=UnitBytes.of(chain).inputs[:, None], **found)


def every_stage_bytes(chain: Chain, *, parted: bool) -> dict[str, Floats]:
    """The figures of `StageBytes` but `delayed` and those of first backwards, of every run, [first, last].

    0 where last < first. Cost: O(units²), by one step per first unit.
    """
    units, found = len(chain), dict[str, Floats]()
    ahead, back = chain.boundary_forward, chain.boundary_backward
    for first in range(units):
        held, spaces = _by_last(chain, first, units - 1, _PHASES[:2], parted=parted)
        rows = {
            "weights": held.weights,
            "trained": held.trained,
            "casts": held.casts,
            "saved_activations": held.saved_activations,
            "kept": chain.input_bytes[first],
            "received": ahead[first - 1] if first else 0.0,
            "answered": back[first - 1] if first else 0.0,
            "sent": ahead[first:],
            "returned": back[first:],
            "workspace": held.workspace,
            "forward_workspace": spaces["forward_workspace"],
            "backward_workspace": spaces["backward_workspace"],
        }
        for name, values in rows.items():
            found.setdefault(name, np.zeros((units, units)))[first, first:] = values
    return found


def _by_last(
    chain: Chain, first: int, end: int, phases: Sequence[str] = (), *, parted: bool = True
) -> tuple[HeldBytes[Floats], dict[str, Floats]]:
    """Of the stages that begin with the unit `first`, by their last unit, up to `end`; and the workspaces of these
    phases."""
    units, own = UnitBytes.of(chain), slice(first, end + 1)
    before, after = (missing[own] for missing in missing_shares(chain))
    begins, cut, part = bool(before[0] > 0), after > 0, chain.part_saved_activations[own]
    sent, returned = chain.boundary_forward[own], chain.boundary_backward[own]
    came = float(chain.boundary_forward[first - 1] + chain.boundary_backward[first - 1]) if first else 0.0
    saved = np.cumsum(units.saved_activations[own])
    saved_activations = saved + sent
    if begins or cut.any():
        parts = np.where(cut, part, 0.0) + (part[0] if begins else 0.0)
        saved, saved_activations = saved + parts, saved_activations + parts - _counted_twice(chain, first, end)
    if begins:
        resident = chain.resident_input[first] - _passed_on(chain, first, end)
        saved_activations += resident if parted else np.minimum(resident, chain.kept_input[first])
    if first and not parted:
        saved_activations -= chain.saved_before[first]
    spaces = _workspaces(chain, units, first, end, ("unit_workspace", *phases), parted=parted)
    held = HeldBytes(
        weights=held_weights(chain, units.weights, first, end),
        trained=held_weights(chain, units.trained, first, end),
        casts=held_weights(chain, units.casts, first, end),
        saved_activations=saved_activations,
        delayed=_delayed(chain, units, first, end) if chain.sends_gradient[first] else saved + returned,
        kept=np.full(1, units.inputs[first]),
        buffers=2 * (came + sent + returned),
        workspace=spaces["unit_workspace"],
    )
    return held, spaces


def _passed_on(chain: Chain, first: int, end: int) -> Floats:
    """Bytes of its input that a stage which begins inside a layer keeps and also sends on, by its last unit.

    What passes all of a stage's layers is taken to be the least that passes one of them: values that go past
    several layers mostly end together.
    """
    layers, _, unfinished = _columns(chain, slice(first, end + 1))
    least = np.minimum.accumulate(chain.passing[first : end + 1])
    before = np.concatenate([[np.inf], least])[np.searchsorted(layers, layers)]
    most = np.where(unfinished, before, least)
    return np.asarray(np.minimum(most, chain.resident_input[first]), dtype=np.float64)


def _counted_twice(chain: Chain, first: int, end: int) -> Floats:
    """Bytes of the inputs of layers that a stage has in part which its shares of these layers' activations
    have, by its last unit.

    A stage that begins inside a layer keeps all of its input, and one that ends there sends it.
    """
    layers, share, unfinished = _columns(chain, slice(first, end + 1))
    known = chain.kept_input[first : end + 1]
    kept = np.where(np.isfinite(known), known, 0.0)
    sums = np.concatenate([[0.0], np.cumsum(share)])
    own = (sums[1:] - sums[np.searchsorted(layers, layers)]) * kept
    begins, inside = chain.units[first].start > 0, layers == layers[0]
    here = own[inside][-1] if begins else 0.0
    found = np.where(inside, own * (begins | unfinished), here + own * unfinished)
    return np.asarray(found, dtype=np.float64)


def _columns(chain: Chain, own: slice) -> tuple[Ints, Floats, Bools]:
    """Of each of these units: its layer, its share of it, and whether the layer goes on after it."""
    layers, share, unfinished = _all_columns(chain)
    return layers[own], share[own], unfinished[own]


@functools.lru_cache(maxsize=16)
def _all_columns(chain: Chain) -> tuple[Ints, Floats, Bools]:
    return (
        np.array([unit.layer for unit in chain.units]),
        np.array([unit.share for unit in chain.units]),
        np.array([unit.stop < unit.of for unit in chain.units]),
    )


def needed_beyond(needed: Floats, held: Floats, layers: Ints, common: Floats) -> Floats:
    """By a stage's last unit, most that a unit at work needs beyond the activations of all units.

    `needed` is workspace, [..., unit]; `held` are the activations of the units up to each, those after a unit have
    none while it works. `common` is what the last layer's need and a message after it both have, 0 inside of it.
    """
    whole = needed + held
    most = np.maximum.accumulate(whole, axis=-1)
    if common.any():
        begins = np.searchsorted(layers, layers)
        edges = np.flatnonzero(begins == np.arange(len(begins)))
        nothing = np.full((*whole.shape[:-1], 1), -np.inf)
        earlier = np.concatenate([nothing, most], axis=-1)[..., begins]
        own = np.maximum.reduceat(whole, edges, axis=-1)[..., np.searchsorted(edges, begins)]
        most = np.where(common > 0, np.maximum(earlier, own - common), most)
    return np.asarray(most - held, dtype=np.float64)


def _workspaces(
    chain: Chain, units: UnitBytes, first: int, end: int, kinds: Sequence[str], *, parted: bool
) -> dict[str, Floats]:
    """By last unit, most of what a layer needs beyond all saved activations, and what libraries keep: of these
    kinds, and of backwards and weight gradients that make the gradients, which all count as being there.

    What the last layer sends, or the error for it, is part of what it needs, and counts as a message already.
    Deferred weight gradients find all there that they need, and make no input gradients; but a stage that sends no
    input gradient, as the first, defers its whole backward. Of units that recompute, what waits for their weight
    gradients is not among their saved activations: where backwards are `parted` it is there besides.
    """
    own, begins = slice(first, end + 1), chain.units[first].start > 0
    layers, held = _columns(chain, own)[0], np.cumsum(units.saved_activations[own])
    library = np.maximum.accumulate(chain.library[own])

    def needed(kind: str) -> Floats:
        values: Floats = getattr(chain, kind)
        return values[own] - np.where(layers == layers[0], values[first - 1], 0.0) if begins else values[own]

    rows = {kind: needed(kind) for kind in kinds if kind != "weight_workspace"}
    waiting = _waiting_besides(chain)[own].cumsum() if parted and chain.sends_gradient[first] else None
    if waiting is not None:
        rows |= {kind: rows[kind] - waiting for kind in rows if kind != "forward_workspace"}
    if "weight_workspace" in kinds:
        gradients = np.cumsum(units.trained[own])
        rows["first_backward_workspace"] = rows["backward_workspace"] - gradients
    found = dict(
        zip(
            rows, needed_beyond(np.stack(list(rows.values())), held, layers, _in_messages(chain)[own]), strict=True
        )
    )
    if waiting is not None:
        found |= {kind: found[kind] + waiting for kind in found if kind != "forward_workspace"}
    if "weight_workspace" in kinds:
        later = needed("weight_workspace")
        both = (found["backward_workspace"], found["first_backward_workspace"])
        if chain.sends_gradient[first]:
            both = (np.maximum.accumulate(later), np.maximum.accumulate(later - gradients))
        found["weight_workspace"], found["first_weight_workspace"] = both
    return {
        name: (values if name.startswith("first") else np.maximum(0.0, values)) + library
        for name, values in found.items()
    }


@functools.lru_cache(maxsize=16)
def _waiting_besides(chain: Chain) -> Floats:
    """Per unit, bytes that wait for its weight gradients and are not among its saved activations."""
    again = np.zeros(len(chain))
    for first, last in chain.recompute:
        again[first : last + 1] = 1.0
    return np.asarray(again * chain.delayed, dtype=np.float64)


@functools.lru_cache(maxsize=16)
def _in_messages(chain: Chain) -> Floats:
    """Per unit, bytes that its workspace and the messages have in common where a stage ends with it; 0 inside of a
    layer, where the messages have its input too."""
    both = np.minimum(chain.boundary_forward, chain.boundary_backward)
    return np.where(_all_columns(chain)[2], 0.0, np.minimum(chain.unit_workspace, both))


def _delayed(chain: Chain, units: UnitBytes, first: int, end: int) -> Floats:
    """What waits for deferred weight gradients, by last unit; not of a stage that sends no input gradient, which
    defers all of its backward. Part of a layer needs all of its input."""
    own, apart = slice(first, end + 1), int(deferred_from(chain)[first])
    values = np.where(np.arange(first, end + 1) >= apart, units.delayed[own], 0.0)
    before, after = (missing[own] for missing in missing_shares(chain))
    inputs = np.where(values > 0, np.where(before > 0, chain.resident_input[own], chain.input_bytes[own]), 0.0)
    return np.asarray(np.cumsum(values) + before[0] * inputs[0] + after * inputs, dtype=np.float64)
