"""Layers too small to time alone are timed with their neighbours. Pure: no torch."""

from __future__ import annotations

from collections.abc import Sequence

from bapipe.torch.profiler.measurement import Reading

__all__ = ["find_units"]

_TIMES_EMPTY = 3.0
"""a layer must take so many times as long as one that does nothing to be timed alone"""
_MOST = 8
"""layers in one unit"""


def find_units(
    forward: Sequence[Reading],
    backward: Sequence[Reading],
    empty_forward: Reading,
    empty_backward: Reading,
    sends_gradient: Sequence[bool] | None = None,
) -> tuple[tuple[tuple[int, int], ...], tuple[float, ...], tuple[float, ...]]:
    """(first, last) of each unit, and each layer's share of its unit's forward and backward.

    A run of neighbours is joined until it takes three times as long as an empty layer, in both directions; what is
    left over joins the unit before it. Shares are by the layers' own rough times, the empty layer's taken off.
    `sends_gradient` says which layers have an input gradient (None: all). Those that do are not joined with those
    that do not, such as an embedding: of both together no input gradient could be timed.
    """
    ahead = [_net(item, empty_forward) for item in forward]
    back = [_net(item, empty_backward) for item in backward]
    limits = (_TIMES_EMPTY - 1) * _own(empty_forward), (_TIMES_EMPTY - 1) * _own(empty_backward)
    units: list[tuple[int, int]] = []
    start = 0
    for index in range(len(ahead)):
        if sends_gradient is not None and index > start and sends_gradient[index] != sends_gradient[start]:
            units.append((start, index - 1))
            start = index
        enough = sum(ahead[start : index + 1]) >= limits[0] and sum(back[start : index + 1]) >= limits[1]
        if enough or index - start + 1 >= _MOST:
            units.append((start, index))
            start = index + 1
    if start < len(ahead):
        before = units[-1][0] if units else start
        if units and (sends_gradient is None or sends_gradient[before] == sends_gradient[start]):
            units[-1] = (before, len(ahead) - 1)
        else:
            units.append((start, len(ahead) - 1))
    return tuple(units), _shares(ahead, units), _shares(back, units)


def _own(reading: Reading) -> float:
    return max(reading.host.median, reading.device.median if reading.device else 0.0)


def _net(reading: Reading, empty: Reading) -> float:
    return max(0.0, _own(reading) - _own(empty))


def _shares(times: Sequence[float], units: Sequence[tuple[int, int]]) -> tuple[float, ...]:
    shares = [1.0] * len(times)
    for first, last in units:
        total = sum(times[first : last + 1])
        for index in range(first, last + 1):
            shares[index] = times[index] / total if total > 0 else 1 / (last - first + 1)
    return tuple(shares)
