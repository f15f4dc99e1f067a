"""Parking: weights that a board cannot hold lie in a neighbour's spare RAM and come over the link.

FPDeep finds that better than local DDR. Here it is done after the cuts are chosen, and only as much of it as
shortens the period.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from bapipe.fpga.placement import ddr_seconds, update_seconds
from bapipe.fpga.stage_sizing import StageLoad

if TYPE_CHECKING:
    from bapipe.fpga.exact_cuts import Run

__all__ = ["Parked", "park"]

_STEPS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """Weights of one stage in another's RAM."""

    stage: int
    host: int
    bytes: float
    link_bytes: float
    """per image over the link"""


def park(
    run: Run, loads: Sequence[StageLoad], crossings: Sequence[tuple[float, float]]
) -> tuple[list[StageLoad], tuple[Parked, ...]]:
    """The loads with as much parked as shortens the longest stage, and what was parked.

    Bisects the period; for each trial the boards from the first to the last take spare RAM of the board before
    them, then of the board after.
    """
    rule = run.rule
    floor = [float(rule.slots(load.fill)) * load.compute for load in loads]
    links = [
        float(rule.link_period(forward, backward, link))
        for (forward, backward), link in zip(crossings, run.links[: run.depth - 1], strict=True)
    ]
    low, high = max([*floor, *links]), max(load.period for load in loads)
    if not np.isfinite(high) or high <= low:
        return list(loads), ()
    best = _trial(run, loads, crossings, low)
    if best is None:
        for _ in range(_STEPS):
            middle = (low + high) / 2
            found = _trial(run, loads, crossings, middle)
            if found is None:
                low = middle
            else:
                best, high = found, middle
    if best is None:
        return list(loads), ()
    return _moved(run, loads, best), tuple(best)


def _spare(load: StageLoad) -> float:
    placed, demand = load.spill, load.demand
    state = demand.state if load.board.ddr <= 0 else 0.0
    used = placed.weights_on + placed.gradients_on + placed.features_on + demand.buffers + state
    return max(0.0, float(load.board.ram - used))


def _trial(
    run: Run, loads: Sequence[StageLoad], crossings: Sequence[tuple[float, float]], period: float
) -> list[Parked] | None:
    """What must be parked so that every stage keeps the period, or None."""
    b, parameters = run.rule.microbatch, run.parameters
    spare = [_spare(load) for load in loads]
    parked: list[Parked] = []
    for index, load in enumerate(loads):
        excess = b * load.ddr - period
        if excess <= 0:
            continue
        bandwidth = load.board.ddr_bandwidth * parameters.ddr_efficiency
        shared = min(parameters.reuse, load.images)
        saved = min(parameters.weight_reads, parameters.gradient_passes) / shared
        read = parameters.weight_reads / shared
        if bandwidth <= 0 or saved <= 0:
            return None
        lacking = excess / b * bandwidth / saved * (1 + 1e-12)
        if lacking > float(load.spill.weights_off + load.spill.gradients_off):
            return None
        for host, cut in ((index - 1, index - 1), (index + 1, index)):
            if lacking <= 0 or not 0 <= host < len(loads):
                continue
            sent = crossings[cut][0] if host < index else crossings[cut][1]
            room = max(0.0, period / b * run.links[cut].bandwidth - sent) / read if read else np.inf
            amount = min(lacking, spare[host], room)
            if amount > 0:
                spare[host] -= amount
                lacking -= amount
                parked.append(Parked(stage=index, host=host, bytes=amount, link_bytes=amount * read))
        if lacking > 1e-9:
            return None
    return parked


def _moved(run: Run, loads: Sequence[StageLoad], parked: Sequence[Parked]) -> list[StageLoad]:
    moved = list(loads)
    for item in parked:
        load = moved[item.stage]
        placed = load.spill
        # Weights that leave DDR first; then parked weights make room on chip for gradients.
        weights = min(item.bytes, float(placed.weights_off))
        gradients = item.bytes - weights
        placed = replace(
            placed,
            weights_off=placed.weights_off - weights,
            weights_on=placed.weights_on - gradients,
            gradients_on=placed.gradients_on + gradients,
            gradients_off=placed.gradients_off - gradients,
        )
        ddr = float(ddr_seconds(placed, load.board, run.parameters))
        compute = float(run.rule.slots(load.fill)) * load.compute
        moved[item.stage] = replace(
            load,
            spill=placed,
            ddr=ddr,
            update=float(update_seconds(placed, load.board, run.parameters)),
            period=max(compute, run.rule.microbatch * ddr),
        )
    return moved
