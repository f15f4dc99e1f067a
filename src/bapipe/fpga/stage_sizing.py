"""One stage on one board, dimensioned exactly: C, D, what spills, and the period they allow."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from bapipe.fpga.assumptions import Parameters
from bapipe.fpga.board import Board
from bapipe.fpga.cnn import Geometry, NetLayer
from bapipe.fpga.cut_places import Units
from bapipe.fpga.placement import Demand, Spill, ddr_seconds, spill, update_seconds
from bapipe.fpga.schedule_rules import Rule
from bapipe.fpga.tiling import shortest_interval

__all__ = ["Held", "StageLoad", "compute_seconds", "held_layers", "load_stage"]


@dataclass(frozen=True, slots=True)
class Held:
    """A layer, or the channels [start, stop) of it, on one board."""

    index: int
    layer: NetLayer
    start: int
    stop: int
    of: int

    @property
    def share(self) -> float:
        return (self.stop - self.start) / self.of

    @property
    def geometry(self) -> Geometry | None:
        """The loops of this part."""
        loops = self.layer.geometry
        if loops is None or self.stop - self.start == self.of:
            return loops
        # Channels are the steps of the split; where a layer has fewer steps than outputs, round up.
        return replace(loops, outputs=-(-loops.outputs * (self.stop - self.start) // self.of))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageLoad:
    """What a stage asks of its board, per image unless said otherwise."""

    board: Board
    first: int
    """position it starts at"""
    stop: int
    """position after its last unit"""
    compute: float
    """C, seconds; infinite if the board has fewer DSPs than modules"""
    ddr: float
    """D, seconds"""
    fill: float
    """δ, image times until the last layer starts"""
    images: int
    """in flight at once"""
    demand: Demand
    spill: Spill
    update: float
    """seconds per global batch"""
    period: float
    """seconds per micro-batch that compute and DDR allow; infinite if something does not fit"""

    @property
    def ratio(self) -> float:
        """ρ = D/C."""
        return self.ddr / self.compute if self.compute > 0 else 0.0


def held_layers(units: Units, u: int, v: int) -> tuple[Held, ...]:
    """The layers and parts of layers in a stage."""
    found: dict[int, Held] = {}
    for unit in units.units[u:v]:
        start = found[unit.layer].start if unit.layer in found else unit.start
        found[unit.layer] = Held(unit.layer, units.network.layers[unit.layer], start, unit.stop, unit.of)
    return tuple(found.values())


def compute_seconds(units: Units, u: int, v: int, board: Board, parameters: Parameters) -> float:
    """C: seconds per image of units u to v − 1 on all DSPs of a board."""
    if parameters.allocation == "fluid":
        return float(units.macs[v] - units.macs[u]) / board.rate
    modules = [
        (held.geometry, len(held.layer.modules))
        for held in held_layers(units, u, v)
        if held.geometry is not None and held.layer.modules
    ]
    cycles = shortest_interval(modules, board.dsp, board.macs_per_dsp)
    return np.inf if cycles is None else cycles / board.cycles_per_second


def load_stage(
    units: Units, u: int, v: int, board: Board, rule: Rule, *, behind: int, copies: float, parameters: Parameters
) -> StageLoad:
    """The stage of units u to v − 1 with `behind` boards from it to the end of the pipeline."""
    at, end = np.int64(u), np.int64(v)
    images = rule.images(behind)
    demand = units.demand(at, end, images=images, board=board, copies=copies)  # type: ignore[arg-type]
    found = spill(demand, board)
    compute = compute_seconds(units, u, v, board, parameters)
    ddr = float(ddr_seconds(found, board, parameters))
    update = float(update_seconds(found, board, parameters))
    fill = float(units.fill(at, end))  # type: ignore[arg-type]
    period = max(float(rule.slots(fill)) * compute, rule.microbatch * ddr)
    fits = bool(found.fits) and np.isfinite(update)
    return StageLoad(
        board=board,
        first=u,
        stop=v,
        compute=compute,
        ddr=ddr,
        fill=fill,
        images=images,
        demand=demand,
        spill=found,
        update=update,
        period=period if fits else np.inf,
    )
