"""Tables I and II: the schedules' time per global batch, bubble, memory and bandwidth, each from the simulator.

The paper assumes M ≥ 2N, F ≤ B and SR ≤ F. One case is printed, the one its figures draw (3 accelerators, 8
micro-batches); all of `GRID` is simulated and compared as well.
"""

from __future__ import annotations

from bapipe.reproduce.table_cells import Cell, Claim, Table
from bapipe.schedule.closed_forms import paper_table_row
from bapipe.schedule.generators import make_schedule
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.simulate import simulate
from bapipe.simulator.summary import Summary, summarise

__all__ = ["GRID", "SHOWN", "table1", "table2"]

Case = tuple[int, int, float, float, float]
"""N, M, F, B, SR"""
SHOWN: Case = (3, 8, 10.0, 20.0, 5.0)
GRID: tuple[Case, ...] = tuple(
    (N, M, F, B, SR)
    for N in (2, 3, 4, 8)
    for M in (2 * N, 2 * N + 1, 5 * N + 3)
    for F, B, SR in ((10.0, 10.0, 5.0), (10.0, 20.0, 0.0), (10.0, 20.0, 10.0), (7.0, 13.0, 7.0))
)


def _simulated(name: str, case: Case) -> Summary:
    N, M, F, B, SR = case
    schedule, costs = make_schedule(name, N, M), Costs.of(N, forward=F, backward=B, transfer=SR)
    return summarise(schedule, costs, simulate(schedule, costs))


def _cells(name: str, case: Case) -> list[Cell]:
    N, M, F, B, SR = case
    printed, got = paper_table_row(name, N, M, F, B, SR), _simulated(name, case)
    activations = printed["activations"]
    assert isinstance(activations, list)
    pairs: list[tuple[str, object, float]] = [
        ("Time per global batch", printed["time"], got.time),
        ("Pipeline bubble", printed["bubble"], got.bubble),
        *(
            (f"Activation memory, i={index} (in a)", activations[index - 1], got.peak_activations[index - 1])
            for index in range(1, N + 1)
        ),
        ("Weights memory (in w)", printed["weights"], max(got.weights_memory)),
        ("Bandwidth (in a)", printed["bandwidth"], got.bandwidth_demand),
    ]
    return [
        Cell(row=row, column=name.upper(), paper=float(str(paper)), ours=float(ours), limit=0.0)
        for row, paper, ours in pairs
    ]


def _table(number: int, names: tuple[str, str], title: str) -> Table:
    cells = [cell for name in names for cell in _cells(name, SHOWN)]
    wrong = sum(not cell.holds for name in names for case in GRID for cell in _cells(name, case))
    N, M, F, B, SR = SHOWN
    return Table(
        name=f"table{number}",
        title=title,
        cells=tuple(cells),
        claims=(
            Claim(
                text=f"every figure of {len(GRID)} other cases (N, M, F, B, SR) is the printed formula's, too",
                holds=wrong == 0,
            ),
        ),
        remarks=(
            f"case shown: N={N}, M={M}, F={F:g}, B={B:g}, SR={SR:g}; nothing is calibrated: the paper's side is "
            "its formula, ours the simulated schedule",
            "the paper leaves out min(M, ·) from the activation memory, which matters for M < 2N only",
        ),
    )


def table1() -> Table:
    """Asynchronous execution (FPGA)."""
    return _table(1, ("1f1b-as", "fbp-as"), "Table I: 1F1B-AS and FBP-AS")


def table2() -> Table:
    """Synchronous execution (GPU)."""
    return _table(2, ("1f1b-sno", "1f1b-so"), "Table II: 1F1B-SNO and 1F1B-SO")
