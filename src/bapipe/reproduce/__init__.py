"""The paper's six tables, computed by the planner and the simulator and set beside what the paper prints."""

from __future__ import annotations

from collections.abc import Callable

from bapipe.reproduce.fpga_tables import table5, table6
from bapipe.reproduce.model_sizes import table4
from bapipe.reproduce.schedule_tables import table1, table2
from bapipe.reproduce.speedups import table3
from bapipe.reproduce.table_cells import Cell, Claim, Constant, Table, table_values

__all__ = ["TABLES", "Cell", "Claim", "Constant", "Table", "table_values"]

TABLES: dict[str, Callable[[], Table]] = {
    "table1": table1,
    "table2": table2,
    "table3": table3,
    "table4": table4,
    "table5": table5,
    "table6": table6,
}
"""name -> what computes it; a few seconds at most"""
