"""Board: an FPGA as the model sees it, for one dtype."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import DTYPE_BYTES, AcceleratorType, Cluster

__all__ = ["TRANSCEIVER_RATES", "Board", "boards_of", "make_board", "require_transceivers"]

TRANSCEIVER_RATES = {"gty": 32.75e9 / 8, "gtm": 58e9 / 8}
"""bytes/s per direction of one transceiver (Xilinx DS890)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """Figures of one board."""

    type: str
    dsp: int
    """DSP slices"""
    macs_per_dsp: float
    """multiply-adds of this dtype that a DSP does per cycle"""
    cycles_per_second: float
    """clock · utilisation: cycles in which a DSP multiplies"""
    ram: float
    """bytes of on-chip RAM that data may fill"""
    ram_installed: float
    """bytes of on-chip RAM in all"""
    ddr: float
    """bytes; 0: the board has none"""
    ddr_bandwidth: float
    """bytes/s"""
    element: int
    """bytes of one number"""
    transceivers: float = math.inf
    """bytes/s per direction of all transceivers together; infinite where their number is not known"""

    @property
    def rate(self) -> float:
        """Multiply-adds per second of all DSPs together."""
        return self.dsp * self.macs_per_dsp * self.cycles_per_second


def make_board(kind: AcceleratorType, *, dtype: str) -> Board:
    """The board of a type; refuses one without DSPs and a dtype that it does not work in."""
    figures = kind.board
    if not figures.get("dsp"):
        raise BaPipeError(f"board '{kind.name}' has no DSPs to multiply with; give board.dsp in its type")
    if dtype not in kind.flops:
        known = ", ".join(kind.flops)
        raise BaPipeError(f"board '{kind.name}' works in {known}, got {dtype}; give --precision {known}")
    clock = figures["clock"]
    return Board(
        type=kind.name,
        dsp=int(figures["dsp"]),
        macs_per_dsp=kind.flops[dtype] / (2 * figures["dsp"] * clock),
        cycles_per_second=clock * figures["utilisation"],
        ram=figures["on_chip_bytes"] * figures["usable_ram"],
        ram_installed=figures["on_chip_bytes"],
        ddr=kind.memory,
        ddr_bandwidth=kind.memory_bandwidth,
        element=DTYPE_BYTES[dtype],
        transceivers=_transceivers(figures),
    )


def _transceivers(figures: dict[str, float]) -> float:
    known = [figures[name] * rate for name, rate in TRANSCEIVER_RATES.items() if name in figures]
    return sum(known) if known else math.inf


def require_transceivers(cluster: Cluster, boards: Sequence[Board]) -> None:
    """Refuse links of a chain that ask for more than a board's transceivers carry."""
    for index, board in enumerate(boards):
        others = [other for other in (index - 1, index + 1) if 0 <= other < len(boards)]
        asked = sum(cluster.link(index, other).bandwidth for other in others)
        if asked > board.transceivers:
            raise BaPipeError(
                f"the links of {cluster.accelerators[index].name} ask for {asked * 8e-9:.4g} Gb/s each way, the "
                f"transceivers of a {board.type} carry {board.transceivers * 8e-9:.4g}; lower the links' bandwidth"
            )


def boards_of(cluster: Cluster, *, dtype: str) -> tuple[Board, ...]:
    """The cluster's boards in its order, which is the order of the chain."""
    made = {name: make_board(kind, dtype=dtype) for name, kind in cluster.types.items()}
    return tuple(made[item.type] for item in cluster.accelerators)
