"""Integer DSP allocation: whole tiles for every module, and the shortest interval that a board's DSPs allow.

A module works through ⌈Ci/Tn⌉ · ⌈Co/Tm⌉ · ⌈K²/Tk⌉ · H·W cycles per image on Tn · Tm · Tk multipliers. FP, EB and
WG of a layer have the same loops, the roles of input and output channels exchanged, so one table serves all three.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bapipe.fpga.cnn import Geometry

__all__ = ["Front", "Tile", "front", "shortest_interval", "tile_at"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How a module is unrolled."""

    tn: int
    """input channels at once"""
    tm: int
    """output channels at once"""
    tk: int
    """kernel taps at once"""
    dsp: int
    cycles: int
    """per image"""


@dataclass(frozen=True, slots=True, eq=False)
class Front:
    """The tiles of one loop nest that no other beats, by increasing rounds (cycles per pixel)."""

    rounds: Ints
    multipliers: Ints
    """decreasing"""
    tiles: Ints
    """[entry, 3]: Tn, Tm, Tk"""

    def multipliers_within(self, rounds: Ints) -> Ints:
        """The least multipliers that need at most so many rounds; a huge number where none can."""
        at = np.searchsorted(self.rounds, rounds, side="right") - 1
        found: Ints = np.where(at >= 0, self.multipliers[np.maximum(at, 0)], _IMPOSSIBLE)
        return found


_IMPOSSIBLE = 2**40


def _tiles(size: int) -> Ints:
    """The sizes of a tile that matter: the least for each number of rounds, about 2√size of them."""
    root = math.isqrt(size)
    few = np.arange(1, root + 2, dtype=np.int64)
    return np.unique(np.concatenate([few, -(-size // few)]))


@functools.lru_cache(maxsize=20_000)
def front(inputs: int, outputs: int, taps: int) -> Front:
    """All useful tilings of a loop nest, found by trying every tile size that saves a round."""
    sizes = np.meshgrid(_tiles(inputs), _tiles(outputs), _tiles(taps), indexing="ij")
    tn, tm, tk = (size.ravel() for size in sizes)
    rounds = -(-inputs // tn) * -(-outputs // tm) * -(-taps // tk)
    multipliers = tn * tm * tk
    order = np.lexsort((multipliers, rounds))
    rounds, multipliers = rounds[order], multipliers[order]
    least = np.minimum.accumulate(multipliers)
    keep = np.concatenate([[True], multipliers[1:] < least[:-1]])
    tiles = np.stack([tn[order], tm[order], tk[order]], axis=1)
    return Front(rounds[keep], multipliers[keep], tiles[keep])


def tile_at(geometry: Geometry, cycles: float, macs_per_dsp: float) -> Tile | None:
    """The least tile with which the module takes at most `cycles` per image; None if there is none."""
    options = front(geometry.inputs, geometry.outputs, geometry.taps)
    at = int(np.searchsorted(options.rounds, int((cycles + 1e-6) // geometry.pixels), side="right")) - 1
    if at < 0:
        return None
    tn, tm, tk = (int(size) for size in options.tiles[at])
    return Tile(
        tn=tn,
        tm=tm,
        tk=tk,
        dsp=math.ceil(int(options.multipliers[at]) / macs_per_dsp - 1e-9),
        cycles=int(options.rounds[at]) * geometry.pixels,
    )


def shortest_interval(modules: Sequence[tuple[Geometry, int]], dsp: int, macs_per_dsp: float) -> int | None:
    """The least cycles per image within which all modules, (loops, how many), fit in `dsp` DSPs.

    None if not even one DSP per module is there. Exact: only the cycles of some tile can be the answer.
    """
    if not modules:
        return 0
    fronts = [front(item.inputs, item.outputs, item.taps) for item, _ in modules]
    marks = np.unique(
        np.concatenate([one.rounds * item.pixels for one, (item, _) in zip(fronts, modules, strict=True)])
    )

    def fits(cycles: int) -> bool:
        used = 0
        for one, (item, count) in zip(fronts, modules, strict=True):
            at = int(np.searchsorted(one.rounds, cycles // item.pixels, side="right")) - 1
            if at < 0:
                return False
            used += count * math.ceil(int(one.multipliers[at]) / macs_per_dsp - 1e-9)
            if used > dsp:
                return False
        return True

    low, high = 0, len(marks) - 1
    if not fits(int(marks[high])):
        return None
    while low < high:
        middle = (low + high) // 2
        if fits(int(marks[middle])):
            high = middle
        else:
            low = middle + 1
    return int(marks[low])
