"""What was measured on slices of one GPU (benchmarks/slices), as further cells of Tables III and IV.

result.json has `runs`, each of `slices` equal parts of one GPU with `rows` of `model`, `case` and `throughput`
(samples/s); rows that failed have an `error` instead. A run with `emulated` had its links slowed down and is shown
apart; one whose `percentages` differ is left out. Two rows are compared only where they are of one run. `largest`,
where it is there, has rows of `system`, `slices` and `layers` for Table IV. What the file lacks is shown as not
measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bapipe.errors import BaPipeError, FileFormatError
from bapipe.io.files import load_json
from bapipe.reproduce.paper_figures import TABLE3, TABLE4, PaperRun
from bapipe.reproduce.table_cells import Cell

__all__ = ["DEFAULT_RESULTS", "Measured", "measured_cells", "read_measured"]

DEFAULT_RESULTS = Path(__file__).parents[3] / "benchmarks" / "slices" / "result.json"
"""the file of the checkout that this module lies in; an installed package has none"""
_OVER_PLAIN = {"PipeDream": "pipedream", "GPipe": "gpipe-8", "BaPipe": "auto"}
_OVER_ACCUMULATED = {"BaPipe": "auto", "1F1B-SO, forced,": "so"}
_PLAIN, _ACCUMULATED = "dp-64", "dp"
"""cases of benchmarks/slices/cases.py: data parallelism at B = 64, and at the pipelines' global batch"""


Rates = dict[tuple[str, int, str], float]
"""(model, slices, case) -> samples/s"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The file's figures, of runs on equal slices."""

    environment: str
    throughput: tuple[Rates, ...]
    """of each run, the last one last"""
    emulated: tuple[Rates, ...]
    """the same of runs whose links were slowed down"""
    largest: dict[tuple[str, int], float]
    """(system, slices) -> L of GNMT-L"""


def read_measured(path: str | Path | None = None) -> Measured:
    """Read result.json; None: the checkout's own."""
    file = DEFAULT_RESULTS if path is None else Path(path)
    if path is None and not file.exists():
        raise BaPipeError(
            "the measured results are not part of the installed package; give --results FILE, such as "
            "benchmarks/slices/result.json of a checkout"
        )
    data = load_json(file)
    if not isinstance(data, dict) or not isinstance(data.get("runs", []), list):
        raise FileFormatError(f"{file} has no list of runs; give the result.json of benchmarks/slices")
    usable = [run for run in data.get("runs", []) if _usable(run)]
    largest: dict[tuple[str, int], float] = {}
    for row in data.get("largest", []):
        count, layers = (row.get("slices"), row.get("layers")) if isinstance(row, Mapping) else (None, None)
        if isinstance(count, int) and isinstance(layers, (int, float)):
            largest[str(row.get("system")), count] = float(layers)
    return Measured(
        environment=str(data.get("environment", "not recorded")),
        throughput=tuple(_rates(run) for run in usable if not run.get("emulated")),
        emulated=tuple(_rates(run) for run in usable if run.get("emulated")),
        largest=largest,
    )


def _usable(run: Any) -> bool:
    """Equal slices only: others are not the paper's cluster."""
    if not isinstance(run, Mapping) or not isinstance(run.get("slices"), int):
        return False
    shares = run.get("percentages")
    return shares is None or len(set(shares)) <= 1


def _rates(run: Mapping[str, Any]) -> Rates:
    found: Rates = {}
    for row in run.get("rows", []):
        value = row.get("throughput") if isinstance(row, Mapping) else None
        if isinstance(value, (int, float)) and value > 0:
            model, count = str(row.get("model")), int(run["slices"])
            found[model, count, str(row.get("case"))] = float(value)
            if row.get("case") == "auto" and row.get("schedule") == "data-parallel":
                found.setdefault((model, count, _ACCUMULATED), float(value))  # it is the same plan
    return found


def measured_cells(name: str, found: Measured) -> tuple[Cell, ...]:
    """The further cells of a table; none where nothing can be measured on GPUs."""
    if name == "table3":
        real = [cell for run in TABLE3 for cell in _speedups(run, found.throughput, "measured")]
        slowed = [cell for run in TABLE3 for cell in _speedups(run, found.emulated, "measured, emulated links")]
        return (*real, *(cell for cell in slowed if cell.ours is not None))
    if name == "table4":
        printed = {(system, count): layers for system, row in TABLE4.items() for count, layers in row.items()}
        return tuple(
            Cell(
                row=system,
                column=f"L, {count} slice{'s' if count > 1 else ''}, measured",
                paper=printed.get((system, count)),
                ours=found.largest.get((system if count > 1 else "DP", count)),  # all are one on one slice
            )
            for system, count in dict.fromkeys((*printed, *found.largest))
        )
    return ()


def _speedups(run: PaperRun, runs: Sequence[Rates], how: str) -> list[Cell]:
    """Over data parallelism at B = 64 on the same slices, as the paper has it, and over accumulated."""
    row = f"{run.title}, {run.accelerators} slices"

    def over(case: str, reference: str) -> float | None:
        for rates in reversed(runs):
            rate, base = (rates.get((run.model, run.accelerators, name)) for name in (case, reference))
            if rate is not None and base is not None:
                return rate / base
        return None

    paper = {
        "PipeDream": next(iter(run.pipedream.values())),
        "GPipe": 1.0 if run.gpipe is None else run.gpipe.speedup,
        "BaPipe": 1.0 if run.bapipe is None else run.bapipe.speedup,
    }
    cells = []
    if 32 in run.data_parallel:
        ours = over("dp-32", _PLAIN)
        cells.append(Cell(row=row, column=f"DP, B=32, {how}", paper=run.data_parallel[32], ours=ours))
    for system, case in _OVER_PLAIN.items():
        cells.append(Cell(row=row, column=f"{system}, {how}", paper=paper[system], ours=over(case, _PLAIN)))
    for system, case in _OVER_ACCUMULATED.items():
        column = f"{system} over DP accumulated, {how}"
        cells.append(Cell(row=row, column=column, paper=None, ours=over(case, _ACCUMULATED)))
    return cells
