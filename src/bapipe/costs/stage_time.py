"""Seconds that a stage takes for a micro-batch and for its optimizer step: the one place that says so.

A stage runs the units [first, last] of a chain. Its time is what its units take together, and what a part of a
layer takes beyond its share at each end that lies inside a layer; with replicas of several accelerator types, that
of the slowest. The same code serves a list of stages and every run of units at once.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bapipe.costs.segments import Chain, Floats

__all__ = [
    "StageSeconds",
    "UnitSeconds",
    "deferred_from",
    "every_run",
    "missing_shares",
    "run_sums",
    "stage_seconds",
]

Ints = NDArray[np.int64]
_FIELDS = ("forward", "backward", "work", "weight_gradient", "parting", "update")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitSeconds:
    """What each unit takes, [type, unit].

    Sums of these are the time of a stage that begins and ends between layers, and a lower bound of any other: they
    have nothing of what parts of layers cost on top. The exact partition and the paper's steps go by them, because
    they add up unit after unit.
    """

    forward: Floats
    backward: Floats
    weight_gradient: Floats
    parting: Floats
    update: Floats

    @classmethod
    def of(cls, chain: Chain) -> UnitSeconds:
        """Of all units of the chain."""
        return cls(
            forward=chain.forward,
            backward=chain.backward,
            weight_gradient=chain.weight_gradient,
            parting=chain.parting,
            update=chain.update,
        )

    @property
    def work(self) -> Floats:
        """Forward plus backward."""
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True, eq=False)
class StageSeconds:
    """What stages take, [stage], or every run of units, [first, last]; each figure is made when asked for."""

    chain: Chain
    first: Ints
    last: Ints
    """of each stage, included; as broadcasting arrays"""
    rows: Ints
    """types that are counted"""
    on: NDArray[np.bool_] | None = None
    """[row, stage] whether a replica of the stage is of that type; None: all are"""

    @functools.cached_property
    def forward(self) -> Floats:
        """Per micro-batch, as are those up to `parting`."""
        return self._slowest("forward")

    @functools.cached_property
    def backward(self) -> Floats:
        return self._slowest("backward")

    @functools.cached_property
    def work(self) -> Floats:
        """Forward plus backward, of the type that is slowest at both together."""
        return self._slowest("work")

    @functools.cached_property
    def weight_gradient(self) -> Floats:
        """What of the backward can be deferred: all of it where no input gradient is sent on, as at a first
        stage."""
        begin = deferred_from(self.chain)[self.first]
        own = self._slowest("weight_gradient", None if (begin == self.first).all() else begin)
        return np.where(self._parts, np.minimum(own, self.backward), self.backward)

    @functools.cached_property
    def parting(self) -> Floats:
        """How much longer the backward takes in two parts; not at a stage that defers it as a whole."""
        return np.where(self._parts, self._slowest("parting"), 0.0)

    @functools.cached_property
    def _parts(self) -> NDArray[np.bool_]:
        """Whether a stage has an input gradient to send on before its weight gradients."""
        return np.asarray(self.chain.sends_gradient[self.first], dtype=np.bool_)

    @functools.cached_property
    def update(self) -> Floats:
        """Of an optimizer step: all weights of a layer where every part of it holds them all."""
        return self._slowest("update")

    @functools.cached_property
    def _together(self) -> Floats:
        """[field, row, stage] all sums at once: as many calls as there are stages, not as stages and fields."""
        return run_sums(_stacked(self.chain)[:, self.rows], self.first, self.last)

    def _slowest(self, field: str, first: Ints | None = None) -> Floats:
        """The sum of the units' figures, from `first` on, and what the ends add."""
        begins, ends = _at_ends(self.chain)
        if first is None and self.first.ndim == 1:
            found = self._together[_FIELDS.index(field)]
        else:
            values = _stacked(self.chain)[_FIELDS.index(field), self.rows]
            found = run_sums(values, self.first if first is None else first, self.last)
        if field in begins:
            begin, end = begins[field][self.rows], ends[field][self.rows]
            found = found + (begin[:, self.first] + end[:, self.last])
        held = found if self.on is None else np.where(self.on, found, -np.inf)
        return np.asarray(held[0] if len(held) == 1 else held.max(axis=0), dtype=np.float64)


def run_sums(values: Floats, first: Ints, last: Ints) -> Floats:
    """Along the last axis of `values`, the sum over each run [first, last], 0 if that is empty.

    Of a list of runs each is summed by itself, so that alike stages are alike to the last bit; of all runs at
    once, [first, 1] and [1, last], by running sums.
    """
    if first.ndim == 1:
        runs = zip(first.tolist(), last.tolist(), strict=True)
        return np.stack([values[..., begin : end + 1].sum(axis=-1) for begin, end in runs], axis=-1)
    sums = np.concatenate([np.zeros((*values.shape[:-1], 1)), np.cumsum(values, axis=-1)], axis=-1)
    return np.asarray(np.maximum(0.0, sums[..., last + 1] - sums[..., first]), dtype=np.float64)


def stage_seconds(
    chain: Chain, spans: Sequence[tuple[int, int]], types: Sequence[Collection[int]] | None = None
) -> StageSeconds:
    """Of stages, each with its first and last unit and the rows of its replicas' types, by default all of them."""
    first, last = np.array(spans, np.int64).T
    if types is None:
        return StageSeconds(chain=chain, first=first, last=last, rows=np.arange(len(chain.types)))
    rows = sorted({row for kinds in types for row in kinds})
    on = None if len(rows) == 1 else np.array([[row in kinds for kinds in types] for row in rows])
    return StageSeconds(chain=chain, first=first, last=last, rows=np.array(rows), on=on)


def every_run(chain: Chain, row: int) -> StageSeconds:
    """Of every run of units on one accelerator type; what stands where last < first means nothing."""
    units = np.arange(len(chain))
    return StageSeconds(chain=chain, first=units[:, None], last=units[None, :], rows=np.array([row]))


@functools.lru_cache(maxsize=16)
def deferred_from(chain: Chain) -> Ints:
    """By the first unit of a stage, the unit from which on its weight gradients can be deferred.

    A part of a recurrent layer that goes on from the state of another part sends an error back for it, and its
    library makes the weight gradients with the errors.
    """
    layers = np.array([unit.layer for unit in chain.units])
    goes_on = np.array([unit.start > 0 for unit in chain.units]) & (chain.shared_weight_bytes > 0)
    return np.where(goes_on, np.searchsorted(layers, layers, side="right"), np.arange(len(chain)))


@functools.lru_cache(maxsize=16)
def missing_shares(chain: Chain) -> tuple[Floats, Floats]:
    """Per unit, the share of its layer before it and after it: what a stage that begins or ends there lacks."""
    return (
        np.array([unit.start / unit.of for unit in chain.units]),
        np.array([1 - unit.stop / unit.of for unit in chain.units]),
    )


@functools.lru_cache(maxsize=16)
def _stacked(chain: Chain) -> Floats:
    """[field, type, unit]"""
    units = UnitSeconds.of(chain)
    return np.stack([getattr(units, field) for field in _FIELDS])


@functools.lru_cache(maxsize=16)
def _at_ends(chain: Chain) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """[type, unit] what a stage that begins with the unit takes on top, inside a layer, and one that ends so."""
    share = np.array([unit.share for unit in chain.units])
    weights = np.where(chain.shared_weight_bytes > 0, UnitSeconds.of(chain).update / share, 0.0)
    parts = {"forward": chain.part_forward, "backward": chain.part_backward}
    parts["work"] = chain.part_forward + chain.part_backward
    begins, ends = (
        {name: np.where(missing > 0, more, 0.0) for name, more in parts.items()} | {"update": missing * weights}
        for missing in missing_shares(chain)
    )
    return begins, ends
