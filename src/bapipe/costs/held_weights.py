"""Weights that a stage holds, and copies of those that it shares with another stage.

A tied weight, as that of an embedding and of the head after it, counts with the layer where it stands first. Where
the other layer is on another rank, that rank holds a copy, with a gradient and optimizer state of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bapipe.costs.segments import Chain, Floats
from bapipe.costs.stage_time import missing_shares

__all__ = ["copies_on_the_same_rank", "held_weights", "stage_gradients", "stage_weights"]


def stage_weights(chain: Chain, first: int, last: int) -> float:
    """Of the units `first` to `last`, included: one copy."""
    return float(_weights(chain, chain.weight_bytes, first, last)[-1])


def stage_gradients(chain: Chain, first: int, last: int) -> float:
    """Bytes of the gradients of the units `first` to `last`, included: of what is trained."""
    return float(_weights(chain, chain.trainable_bytes, first, last)[-1])


def held_weights(chain: Chain, each: Floats, first: int, end: int) -> Floats:
    """Bytes that go with the weights of the units from `first` on, by last unit up to `end`.

    `each` unit's, the rest of a layer of which every part holds all weights, and copies of what an earlier stage
    holds too.
    """
    found = _weights(chain, each, first, end)
    for copy in _tied_copies(chain, each, first, end).values():
        found = found + copy
    return found


def _tied_copies(chain: Chain, each: Floats, first: int, end: int) -> dict[int, Floats]:
    """By the layer before the stage whose weights layers of the stage share: bytes of the copy, by last unit.

    As much of it is cast as of all that layer's weights. What is trained of that layer counts as tied, as far as
    it goes: beside a tied embedding that is trained there may be a frozen one of positions.
    """
    own, found = slice(first, end + 1), dict[int, Floats]()
    tied, bytes_ = chain.tied_to[own], chain.tied_bytes[own]
    layers = _layers(chain)
    for holder in sorted(set(tied[(tied >= 0) & (tied < layers[first])].tolist())):
        units = layers == holder
        weights = float(chain.weight_bytes[units].sum())
        # Several layers of the stage that share the same have one copy.
        using = np.flatnonzero(tied == holder)
        copied = layers[first + using[0]]
        once = (tied == holder) & (layers[own] == copied)
        if each is chain.trainable_bytes:
            weights = min(weights, float(chain.tied_bytes[layers == copied].sum()))
        share = min(1.0, float(each[units].sum()) / weights) if weights else 0.0
        found[holder] = np.cumsum(np.where(once, share * bytes_, 0.0))
    return found


def _weights(chain: Chain, each: Floats, first: int, end: int) -> Floats:
    """Bytes that go with the weights, by last unit: `each` unit's, and the rest of a layer of which every part
    holds all weights."""
    own, sums = slice(first, end + 1), np.cumsum(each[first : end + 1])
    if not _shares_weights(chain):
        return sums
    before, after = missing_shares(chain)
    weights = chain.weight_bytes
    shared = chain.shared_weight_bytes * np.divide(each, weights, out=np.zeros_like(each), where=weights > 0)
    more = before[first] * shared[first] + after[own] * shared[own]
    return np.asarray(sums + more, dtype=np.float64)


def copies_on_the_same_rank(
    chain: Chain, spans: Sequence[tuple[int, int]], placement: Sequence[tuple[int, ...]]
) -> dict[int, dict[str, float]]:
    """By stage, bytes of weights, trained ones and casts that `held_weights` has and its ranks hold once, with a
    stage before; stages are given by their first and last units, and by their ranks."""
    found: dict[int, dict[str, float]] = {}
    if not (chain.tied_to >= 0).any():
        return found
    layers = _layers(chain)
    rows = {"weights": chain.weight_bytes, "trained": chain.trainable_bytes, "casts": chain.weight_casts}
    for index, ((first, last), ranks) in enumerate(zip(spans, placement, strict=True)):
        before = [span for span, own in zip(spans[:index], placement, strict=False) if own == ranks]
        held = {int(layer) for low, high in before for layer in layers[low : high + 1]}
        if held:
            found[index] = {
                name: sum(
                    float(copy[-1])
                    for holder, copy in _tied_copies(chain, each, first, last).items()
                    if holder in held
                )
                for name, each in rows.items()
            }
    return found


@functools.lru_cache(maxsize=16)
def _shares_weights(chain: Chain) -> bool:
    """Whether every part of some layer holds weights of all of it."""
    return bool((chain.shared_weight_bytes > 0).any())


@functools.lru_cache(maxsize=16)
def _layers(chain: Chain) -> NDArray[np.int64]:
    """The layer of each unit."""
    return np.array([unit.layer for unit in chain.units])
