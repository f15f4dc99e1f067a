"""DSPs that any stage needs to keep any interval, tabulated so that the search can ask for thousands at once.

Intervals are on a grid of cycles a fraction of a per cent apart and rounded down, so that the table never promises
too much; what the search finds is then dimensioned exactly by `bapipe.fpga.tiling`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bapipe.fpga.cut_places import Units
from bapipe.fpga.tiling import front

__all__ = ["GRID_STEP", "DspTable", "make_dsp_table"]

GRID_STEP = 1.003
"""ratio of neighbouring intervals of the table"""
_MOST_POINTS = 6000
_IMPOSSIBLE = 2**30

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DspTable:
    """DSPs by interval, layer and number of slices."""

    units: Units
    shortest: float
    """cycles of the first grid point"""
    step: float
    points: int
    part: NDArray[np.int32]
    """[interval, layer, slices held]"""
    whole: Ints
    """[interval, layer + 1] sums over whole layers before"""

    def need(self, u: Ints, v: Ints, cycles: Floats) -> Ints:
        """DSPs with which units u to v − 1 take at most so many cycles per image."""
        units = self.units
        at = np.floor(np.log(np.maximum(cycles, 1.0) / self.shortest) / math.log(self.step) + 1e-9)
        x = np.clip(at, 0, self.points - 1).astype(np.int64)
        first, last = units.layer[u], units.layer[v - 1]
        head = units.slices[first] - units.slice[u]
        tail = units.slice[v - 1] + 1
        within = self.part[x, first, np.where(first == last, v - u, 0)]
        across = (
            self.part[x, first, head] + self.whole[x, last] - self.whole[x, first + 1] + self.part[x, last, tail]
        )
        found: Ints = np.where(first == last, within, across)
        return np.where(at < 0, _IMPOSSIBLE, found)


def make_dsp_table(units: Units, *, macs_per_dsp: float, shortest: float) -> DspTable:
    """The table from `shortest` cycles up to where every module is down to one multiplier."""
    layers = units.network.layers
    longest = max((layer.geometry.macs for layer in layers if layer.geometry is not None), default=1.0)
    shortest = max(1.0, min(shortest, longest))
    step = max(GRID_STEP, (longest / shortest) ** (1 / _MOST_POINTS))
    points = 2 + math.ceil(math.log(max(longest / shortest, 1.0)) / math.log(step))
    cycles = shortest * step ** np.arange(points)
    most = int(units.slices.max())
    part = np.zeros((points, len(layers), most + 1), np.int32)
    known: dict[tuple[int, int, int, int], Ints] = {}
    for index, layer in enumerate(layers):
        loops = layer.geometry
        if loops is None:
            continue
        count = int(units.slices[index])
        for held in range(1, count + 1):
            # Slices differ by one channel at most; the larger one is assumed.
            channels = loops.outputs if held == count else -(-held * loops.outputs // count)
            key = (loops.inputs, channels, loops.taps, loops.pixels)
            if key not in known:
                rounds = (cycles // loops.pixels).astype(np.int64)
                needed = front(*key[:3]).multipliers_within(rounds)
                known[key] = np.ceil(np.minimum(needed, _IMPOSSIBLE) / macs_per_dsp - 1e-9).astype(np.int64)
            part[:, index, held] = np.minimum(known[key] * len(layer.modules), _IMPOSSIBLE)
    held_whole = part[:, np.arange(len(layers)), units.slices].astype(np.int64)
    whole = np.concatenate([np.zeros((points, 1), np.int64), np.cumsum(held_whole, axis=1)], axis=1)
    return DspTable(units=units, shortest=shortest, step=step, points=points, part=part, whole=whole)
