"""FPGA clusters on the FPDeep architecture: boards and a CNN's layer table -> the best pipeline over them."""

from __future__ import annotations

from bapipe.fpga.assemble_fpga_plan import make_fpga_plan
from bapipe.fpga.assumptions import SOURCES, Parameters, parse_assumptions
from bapipe.fpga.board import Board, boards_of, make_board
from bapipe.fpga.cnn import Cnn, make_network
from bapipe.fpga.explore_fpga import FPGA_STRATEGIES, FpgaExploration, explore_fpga
from bapipe.fpga.fpga_profile import fpga_profile
from bapipe.fpga.outcome import Outcome, simulated
from bapipe.fpga.replicated_boards import DP_VARIANTS, DataParallel, data_parallel
from bapipe.fpga.table6 import PAPER_SPEEDUP, Table6Row, table6

__all__ = [
    "DP_VARIANTS",
    "FPGA_STRATEGIES",
    "PAPER_SPEEDUP",
    "SOURCES",
    "Board",
    "Cnn",
    "DataParallel",
    "FpgaExploration",
    "Outcome",
    "Parameters",
    "Table6Row",
    "boards_of",
    "data_parallel",
    "explore_fpga",
    "fpga_profile",
    "make_board",
    "make_fpga_plan",
    "make_network",
    "parse_assumptions",
    "simulated",
    "table6",
]
