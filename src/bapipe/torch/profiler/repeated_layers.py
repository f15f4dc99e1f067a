"""Layers that compute the same are measured once: a shorter chain stands for the model. Pure: no torch.

    embed  attn mlp  attn mlp  attn mlp  attn mlp  head      the model
    embed  attn mlp  attn mlp                      head      what is measured

Of a run of equal blocks two are kept (of single layers three), so that every layer is measured between neighbours
like its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import fields, replace
from typing import Any

from bapipe.torch.profiler.layer_times import PartRows
from bapipe.torch.profiler.measurement import MeasuredLayer, Measurement, Repeats, SizeMemory

__all__ = [
    "bytes_of_model",
    "find_repeats",
    "kept_layers",
    "model_layers",
    "row_of_model",
    "times_of_model",
]


def _kept(period: int) -> int:
    """Blocks that are kept of a run of equal ones with so many layers each."""
    return 3 if period == 1 else 2


def kept_layers(signatures: Sequence[Hashable]) -> tuple[int, ...]:
    """The layers to measure: of every run of more equal blocks than are needed the first ones.

    What stands behind a kept block can follow it, because it follows a block like it in the model.
    """
    kept: list[int] = []
    index, count = 0, len(signatures)
    while index < count:
        period, times = _longest_run(signatures, index)
        if times > _kept(period):
            kept += range(index, index + _kept(period) * period)
            index += times * period
        else:
            kept.append(index)
            index += 1
    return tuple(kept)


def _longest_run(signatures: Sequence[Hashable], start: int) -> tuple[int, int]:
    """(layers of a block, blocks in a row) of the run from `start` on that leaves most layers out."""
    best, saved = (1, 1), 0
    for period in range(1, (len(signatures) - start) // 3 + 1):
        end = start + period
        while end < len(signatures) and signatures[end] == signatures[end - period]:
            end += 1
        times = (end - start) // period
        if (times - _kept(period)) * period > saved:
            best, saved = (period, times), (times - _kept(period)) * period
    return best


def find_repeats(
    signatures: Sequence[Hashable], kept: Sequence[int], layers: Sequence[MeasuredLayer]
) -> Repeats | None:
    """Which of the kept layers stand for each layer of the model; None where all are kept.

    Times are the mean of all kept layers of the same signature. Bytes are those of the first one whose neighbours
    have the signatures of the layer's own: what a layer is counted for depends on what those keep.
    """
    if len(kept) == len(signatures):
        return None
    alike: dict[Hashable, list[int]] = {}
    between: dict[Hashable, int] = {}
    own = [signatures[layer] for layer in kept]
    for index, signature in enumerate(own):
        alike.setdefault(signature, []).append(index)
        between.setdefault(_context(own, index), index)
    return Repeats(
        layers=tuple(layers),
        timed_as=tuple(tuple(alike[signature]) for signature in signatures),
        weighed_as=tuple(
            between.get(_context(signatures, index), alike[signature][0])
            for index, signature in enumerate(signatures)
        ),
    )


def _context(signatures: Sequence[Hashable], index: int) -> Hashable:
    before = signatures[index - 1] if index else None
    after = signatures[index + 1] if index + 1 < len(signatures) else None
    return before, signatures[index], after


def model_layers(measured: Measurement) -> tuple[MeasuredLayer, ...]:
    """The layers of the model, those included that others were measured for."""
    return measured.repeats.layers if measured.repeats else measured.layers


def times_of_model(measured: Measurement, times: PartRows) -> PartRows:
    """The same rows, one entry per layer of the model: the mean of the measured layers that are alike."""
    if measured.repeats is None:
        return times
    rows = {
        item.name: tuple(
            sum(getattr(times, item.name)[index] for index in alike) / len(alike)
            for alike in measured.repeats.timed_as
        )
        for item in fields(times)
    }
    return PartRows(**rows)


def bytes_of_model(measured: Measurement, memory: SizeMemory) -> SizeMemory:
    """The bytes of all layers of the model from those of the measured ones."""
    rows: dict[str, Any] = {
        item.name: row_of_model(measured, getattr(memory, item.name))
        for item in fields(memory)
        if item.name != "microbatch"
    }
    return replace(memory, **rows)


def row_of_model(measured: Measurement, row: Sequence[float]) -> tuple[float, ...]:
    """Bytes per measured layer as bytes per layer of the model; () stays."""
    if measured.repeats is None or not row:
        return tuple(row)
    return tuple(row[index] for index in measured.repeats.weighed_as)
