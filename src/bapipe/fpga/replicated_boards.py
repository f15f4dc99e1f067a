"""Data parallelism on FPGAs, three ways, as alternatives to the pipeline.

Every board holds the whole network and streams its share of the global batch, shares balanced by throughput. What
decides is where weights and gradients lie, so all variants are shown:

- paper-ddr: in DDR, as the paper says of its baseline; activations on chip as far as they fit;
- greedy-on-chip: on chip as far as they fit, then activations, as the pipeline places them;
- batched-reuse: in DDR, but each pass over them serves several images, whose activations are then kept together.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bapipe.fpga.assumptions import Parameters
from bapipe.fpga.board import Board
from bapipe.fpga.cut_places import Units
from bapipe.fpga.placement import ddr_seconds, spill, update_seconds
from bapipe.fpga.stage_sizing import compute_seconds
from bapipe.hardware.cluster import Cluster
from bapipe.planner.gradient_rings import all_reduce_time

__all__ = ["DP_VARIANTS", "DataParallel", "Replica", "data_parallel"]

DP_VARIANTS = ("paper-ddr", "greedy-on-chip", "batched-reuse")
_IN_FLIGHT = 2
"""images whose activations are kept on a board that runs forward and backward at once: Table I with N = 1"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One board of a data-parallel cluster."""

    type: str
    compute: float
    """C, seconds per image"""
    ddr: float
    """D, seconds per image"""
    images: int
    """its share of a global batch"""
    memory: float
    """bytes on chip and in DDR"""

    @property
    def ratio(self) -> float:
        """ρ = D/C: above 1 the board waits for DDR."""
        return self.ddr / self.compute if self.compute > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    """One variant on one cluster."""

    variant: str
    replicas: tuple[Replica, ...]
    synchronise: float
    """seconds: the all-reduce or the optimizer step in DDR, whichever takes longer"""
    time: float | None
    """seconds per global batch; None if a board cannot hold the network"""


def data_parallel(
    units: Units,
    cluster: Cluster,
    boards: Sequence[Board],
    *,
    variant: str,
    global_batch: int,
    copies: float,
    parameters: Parameters,
) -> DataParallel:
    """max over boards of b_n · max(C_n, D_n), and synchronisation."""
    figures = {board: _figures(units, board, variant, copies, parameters) for board in dict.fromkeys(boards)}
    size = float(units.weights[-1]) * boards[0].element
    members = tuple(range(len(boards)))
    reduce = all_reduce_time(cluster, members, size)
    update = max(figures[board][2] for board in boards)
    fits = all(figures[board][3] for board in boards)
    each = [max(figures[board][0], figures[board][1]) for board in boards]
    images = _shares(each, global_batch) if fits else [0] * len(boards)
    synchronise = max(reduce, update)
    longest = max(count * time for count, time in zip(images, each, strict=True)) if fits else None
    return DataParallel(
        variant=variant,
        replicas=tuple(
            Replica(
                type=board.type,
                compute=figures[board][0],
                ddr=figures[board][1],
                images=count,
                memory=figures[board][4],
            )
            for board, count in zip(boards, images, strict=True)
        ),
        synchronise=synchronise,
        time=None if longest is None else longest + synchronise,
    )


def _figures(
    units: Units, board: Board, variant: str, copies: float, parameters: Parameters
) -> tuple[float, float, float, bool, float]:
    """C, D, optimizer step, whether it fits, and the bytes it takes."""
    reuse = parameters.dp_reuse if variant == "batched-reuse" else parameters.reuse
    in_flight = _IN_FLIGHT * reuse
    start, end = np.int64(0), np.int64(len(units))
    demand = units.demand(start, end, images=in_flight, board=board, copies=copies)  # type: ignore[arg-type]
    placed = spill(demand, board, on_chip=variant == "greedy-on-chip")
    compute = compute_seconds(units, 0, len(units), board, parameters)
    ddr = float(ddr_seconds(placed, board, parameters, reuse=reuse))
    update = float(update_seconds(placed, board, parameters))
    fits = bool(placed.fits) and bool(np.isfinite([compute, ddr, update]).all())
    memory = float(demand.weights * 2 + demand.features * in_flight + demand.buffers + demand.state)
    return compute, ddr, update, fits, memory


def _shares(seconds: Sequence[float], global_batch: int) -> list[int]:
    """Images per board so that the last to finish finishes first; exact for these costs."""
    rate = sum(1 / time for time in seconds)
    counts = [int(global_batch / rate / time) for time in seconds]
    waiting = [
        ((count + 1) * time, index) for index, (count, time) in enumerate(zip(counts, seconds, strict=True))
    ]
    heapq.heapify(waiting)
    for _ in range(global_batch - sum(counts)):
        _, index = heapq.heappop(waiting)
        counts[index] += 1
        heapq.heappush(waiting, ((counts[index] + 1) * seconds[index], index))
    return counts
