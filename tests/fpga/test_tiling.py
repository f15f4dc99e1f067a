"""Whole tiles: the front holds what no tile beats, and the shortest interval is the shortest."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from bapipe.fpga.cnn import Geometry
from bapipe.fpga.tiling import front, shortest_interval, tile_at


def rounds(inputs: int, outputs: int, taps: int, tile: tuple[int, int, int]) -> int:
    return math.ceil(inputs / tile[0]) * math.ceil(outputs / tile[1]) * math.ceil(taps / tile[2])


@pytest.mark.parametrize("loops", [(3, 8, 9), (7, 5, 1), (16, 12, 4), (1, 1, 1), (13, 1, 9)])
def test_the_front_is_that_of_all_tiles(loops: tuple[int, int, int]) -> None:
    found = front(*loops)
    best: dict[int, int] = {}
    for tile in itertools.product(*(range(1, size + 1) for size in loops)):
        key = rounds(*loops, tile)
        best[key] = min(best.get(key, 10**9), math.prod(tile))
    expected, least = [], 10**9
    for key in sorted(best):
        if best[key] < least:
            least = best[key]
            expected.append((key, least))
    assert list(zip(found.rounds.tolist(), found.multipliers.tolist(), strict=True)) == expected
    for count, size, tile in zip(found.rounds, found.multipliers, found.tiles, strict=True):
        assert rounds(*loops, tuple(tile.tolist())) == count
        assert int(np.prod(tile)) == size


@pytest.mark.parametrize("dsp", [3, 7, 20, 61, 400])
def test_the_shortest_interval_is_found_by_trying_them_all(dsp: int) -> None:
    modules = [(Geometry(3, 8, 9, 16), 2), (Geometry(8, 6, 1, 16), 3), (Geometry(6, 10, 1, 1), 3)]

    def need(cycles: int) -> int:
        tiles = [(tile_at(loops, cycles, 1.0), count) for loops, count in modules]
        return sum(10**9 if tile is None else tile.dsp * count for tile, count in tiles)

    found = shortest_interval(modules, dsp, 1.0)
    fitting = [cycles for cycles in range(1, 4000) if need(cycles) <= dsp]
    assert found == (min(fitting) if fitting else None)


def test_two_multiply_adds_per_dsp_halve_the_dsps() -> None:
    loops = Geometry(16, 16, 9, 100)
    one, two = tile_at(loops, 5000, 1.0), tile_at(loops, 5000, 2.0)
    assert one is not None
    assert two is not None
    assert two.dsp == math.ceil(one.dsp / 2)
    assert two.cycles == one.cycles <= 5000


def test_no_modules_take_no_time_and_too_few_dsps_none() -> None:
    assert shortest_interval([], 1, 1.0) == 0
    assert shortest_interval([(Geometry(2, 2, 1, 1), 3)], 2, 1.0) is None
    assert tile_at(Geometry(2, 2, 1, 10), 9, 1.0) is None
