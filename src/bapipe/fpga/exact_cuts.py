"""The exact search: the cuts of least time per global batch on a run of boards in a chain.

T = (M+N−1)·P + update, P the longest of every stage's compute and DDR and every cut's transfer. For a trial P the
positions that a stage can reach grow with its last unit, so one pass over the boards shows whether P can be kept;
bisection finds the least P, and thresholds on transfers and optimizer steps trade the other terms against it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bapipe.fpga.assumptions import Parameters
from bapipe.fpga.board import Board
from bapipe.fpga.cut_places import Units
from bapipe.fpga.dsp_table import DspTable
from bapipe.fpga.placement import ddr_seconds, spill, update_seconds
from bapipe.fpga.schedule_rules import Rule
from bapipe.hardware.cluster import Link

__all__ = ["BestCuts", "Run", "best_cuts"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_EXACT, _GRID = 1e-10, 1e-4
"""relative width at which bisection stops: fluid allocation, and integer, whose table is no finer"""
_TRADES_SMALL, _TRADES_LARGE, _SMALL = 200, 6, 200
"""how often thresholds on transfers and optimizer steps are tightened, and units up to which a search is small"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """A pipeline's boards, first stage first, and the links between them."""

    units: Units
    boards: tuple[Board, ...]
    links: tuple[Link, ...]
    rule: Rule
    copies: float
    """of the weights that the optimizer keeps"""
    parameters: Parameters
    tables: dict[float, DspTable]
    """by multiply-adds per DSP; empty with fluid allocation"""

    @property
    def depth(self) -> int:
        return len(self.boards)

    def least_period(self) -> float:
        """No cuts have a shorter period: all DSPs busy all the time."""
        return self.rule.microbatch * float(self.units.macs[-1]) / sum(board.rate for board in self.boards)

    def bound(self) -> float:
        """No cuts have a shorter time."""
        return self.rule.time(self.least_period(), self.depth)


@dataclass(frozen=True, slots=True, kw_only=True)
class BestCuts:
    """Cuts and their time by the search's own tables."""

    cuts: tuple[int, ...]
    """position after each stage; the last is the end"""
    period: float
    time: float


def _stage_fits(run: Run, index: int, u: Ints, v: Ints, period: float, most_update: float) -> Bools:
    board, rule, units = run.boards[index], run.rule, run.units
    slots = rule.slots(units.fill(u, v))
    demand = units.demand(u, v, images=rule.images(run.depth - index), board=board, copies=run.copies)
    placed = spill(demand, board)
    fits = placed.fits & (rule.microbatch * ddr_seconds(placed, board, run.parameters) <= period)
    fits &= update_seconds(placed, board, run.parameters) <= most_update + rule.head_start(index, period)
    if run.parameters.allocation == "fluid":
        return np.asarray(fits & (slots * units.stage_macs(u, v) / board.rate <= period))
    cycles = period / slots * board.cycles_per_second
    return np.asarray(fits & (run.tables[board.macs_per_dsp].need(u, v, cycles) <= board.dsp))


def _reach(run: Run, index: int, starts: Ints, period: float, most_update: float) -> Ints:
    """For each start the last position up to which the stage keeps the limits; the start itself if none."""
    low = starts.copy()
    # Whole tiles take no less than the ideal share, so compute alone bounds the reach.
    most = run.units.macs[starts] + period / run.rule.microbatch * run.boards[index].rate
    high = np.maximum(np.searchsorted(run.units.macs, most * (1 + 1e-12), side="right") - 1, starts)
    while bool((low < high).any()):
        middle = (low + high + 1) // 2
        open_ = low < high
        asked = np.maximum(middle, starts + 1)
        fits = _stage_fits(run, index, starts, asked, period, most_update)
        low = np.where(open_ & fits, middle, low)
        high = np.where(open_ & ~fits, middle - 1, high)
    return low


def _cuts(
    run: Run, busy: Floats, period: float, most_transfer: float, most_update: float
) -> tuple[int, ...] | None:
    """Cuts that keep the limits, or None. `busy`: [cut, position] least period of a cut there."""
    end = len(run.units)
    reached = [np.array([0], np.int64)]
    reaches: list[Ints] = []
    for index in range(run.depth):
        starts = reached[-1]
        reach = _reach(run, index, starts, period, most_update)
        reaches.append(reach)
        if index == run.depth - 1:
            break
        change = np.zeros(end + 2, np.int64)
        some = reach > starts
        np.add.at(change, starts[some] + 1, 1)
        np.add.at(change, reach[some] + 1, -1)
        possible = np.cumsum(change)[: end + 1] > 0
        possible[end] = False
        possible &= busy[index] <= period
        if not math.isinf(most_transfer):
            possible &= _transfers(run, run.links[index]) <= most_transfer
        following = np.flatnonzero(possible)
        if not len(following):
            return None
        reached.append(following)
    if not bool((reaches[-1] >= end).any()):
        return None
    cuts, at = [end], end
    for index in range(run.depth - 1, 0, -1):
        starts, reach = reached[index], reaches[index]
        choices = starts[(starts < at) & (reach >= at)]
        # Of all cuts that keep the limits the one that sends least.
        sends = run.units.forward[choices] + run.units.backward[choices]
        at = int(choices[int(np.argmin(sends))])
        cuts.append(at)
    return tuple(reversed(cuts))


def _bytes(run: Run) -> int:
    return run.boards[0].element


def _transfers(run: Run, link: Link) -> Floats:
    size = _bytes(run)
    found: Floats = run.rule.transfer(run.units.forward * size, run.units.backward * size, link)
    return found


def _link_periods(run: Run) -> Floats:
    size = _bytes(run)
    forward, backward = run.units.forward * size, run.units.backward * size
    rows = [run.rule.link_period(forward, backward, link) for link in run.links[: run.depth - 1]]
    return np.array(rows) if rows else np.zeros((0, len(run.units) + 1))


def _period_of(run: Run, cuts: Sequence[int], busy: Floats) -> tuple[float, float, float]:
    """Period, longest transfer and exposed optimizer step of cuts, compute by the fluid rule (exact there)."""
    u = np.array([0, *cuts[:-1]], np.int64)
    v = np.array(cuts, np.int64)
    period = transfer = 0.0
    updates = []
    for index, board in enumerate(run.boards):
        one, other = u[index : index + 1], v[index : index + 1]
        images = run.rule.images(run.depth - index)
        placed = spill(run.units.demand(one, other, images=images, board=board, copies=run.copies), board)
        slots = run.rule.slots(run.units.fill(one, other))
        period = max(
            period,
            float((slots * run.units.stage_macs(one, other) / board.rate)[0]),
            run.rule.microbatch * float(np.ravel(ddr_seconds(placed, board, run.parameters))[0]),
        )
        updates.append(float(np.ravel(update_seconds(placed, board, run.parameters))[0]))
    for index, cut in enumerate(cuts[:-1]):
        period = max(period, float(busy[index][cut]))
        transfer = max(transfer, float(_transfers(run, run.links[index])[cut]))
    exposed = max(update - run.rule.head_start(index, period) for index, update in enumerate(updates))
    return period, transfer, exposed


def _least_period(
    run: Run, busy: Floats, low: float, high: float | None, limits: tuple[float, float]
) -> tuple[float, tuple[int, ...]] | None:
    """The least period in (low, high] that some cuts keep, and the cuts."""
    fluid = run.parameters.allocation == "fluid"
    tolerance = _EXACT if fluid else _GRID
    top = low * 1.02 if high is None else high
    cuts = _cuts(run, busy, top, *limits)
    while cuts is None and high is None:
        low, top = top, top * 1.5
        if top > 1e12 * run.least_period():
            return None
        cuts = _cuts(run, busy, top, *limits)
    if cuts is None:
        return None
    if fluid:
        top = min(top, _period_of(run, cuts, busy)[0])
    while top - low > tolerance * top:
        middle = (low + top) / 2
        found = _cuts(run, busy, middle, *limits)
        if found is None:
            low = middle
        else:
            cuts = found
            top = min(middle, _period_of(run, found, busy)[0]) if fluid else middle
    return top, cuts


def best_cuts(run: Run, *, beat: float = math.inf) -> BestCuts | None:
    """The cuts of least time, if that is less than `beat`; None otherwise, or if nothing fits.

    With fluid allocation the result is the optimum over all places where the network may be cut, up to 10⁻¹⁰ and,
    beyond 200 units, up to the number of trades between period, transfers and optimizer steps that are tried.
    """
    if run.depth > len(run.units) or run.bound() >= beat:
        return None
    busy = _link_periods(run)
    best: BestCuts | None = None
    trades = _TRADES_SMALL if len(run.units) <= _SMALL else _TRADES_LARGE
    most_transfer = math.inf
    while True:
        most_update, low = math.inf, run.least_period() * (1 - 1e-12)
        first_transfer: float | None = None
        first_period = 0.0
        while trades > 0:
            trades -= 1
            target = beat if best is None else min(beat, best.time)
            high = None if math.isinf(target) else target / (run.rule.microbatches + run.depth - 1)
            if high is not None and high <= low:
                break
            found = _least_period(run, busy, low, high, (most_transfer, most_update))
            if found is None:
                break
            period, cuts = found
            _, transfer, update = _period_of(run, cuts, busy)
            if first_transfer is None:
                first_transfer, first_period = transfer, period
            time = run.rule.time(period, run.depth, transfer=transfer, update=update)
            if time < target:
                best = BestCuts(cuts=cuts, period=period, time=time)
            if update <= 0:
                break
            low, most_update = period * (1 - 1e-9), update * (1 - 1e-9)
        if run.rule.schedule == "1f1b-as" or first_transfer is None or trades <= 0:
            return best
        if first_transfer <= min(run.rule.forward_share, 1 - run.rule.forward_share) * first_period:
            return best
        most_transfer = first_transfer * (1 - 1e-9)
