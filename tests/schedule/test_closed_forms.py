"""Tables I and II of the paper come out of the simulator row by row, for M ≥ 2N, F ≤ B, SR ≤ F."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest

from bapipe.schedule.closed_forms import paper_table_row
from bapipe.schedule.generators import make_schedule
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.simulate import simulate
from bapipe.simulator.summary import Summary, summarise

CASES = [
    (N, M, F, B, SR)
    for N in (2, 3, 4, 8)
    for M in (2 * N, 2 * N + 1, 5 * N + 3)
    for F, B, SR in ((10, 10, 5), (10, 20, 0), (10, 20, 5), (10, 20, 10), (7, 13, 7), (1, 30, 1))
]
IDS = [",".join(map(str, case)) for case in CASES]


def simulated(name: str, N: int, M: int, F: int, B: int, SR: int) -> Summary:
    schedule, costs = make_schedule(name, N, M), Costs.of(N, forward=F, backward=B, transfer=SR)
    return summarise(schedule, costs, simulate(schedule, costs))


@pytest.mark.parametrize("case", CASES, ids=IDS)
class TestTableI:
    """1F1B-AS and FBP-AS."""

    def test_global_batch_time(self, case: tuple[int, int, int, int, int]) -> None:
        N, M, F, B, _ = case
        assert simulated("1f1b-as", *case).time == (M + N - 1) * (F + B)
        assert simulated("fbp-as", *case).time == (M + N - 1) * (F + B)

    def test_pipeline_bubble(self, case: tuple[int, int, int, int, int]) -> None:
        N, M, *_ = case
        expected = float(Fraction(N - 1, M + N - 1))
        assert simulated("1f1b-as", *case).bubble == pytest.approx(expected, abs=1e-14)
        assert simulated("fbp-as", *case).bubble == pytest.approx(expected, abs=1e-14)

    def test_features_memory(self, case: tuple[int, int, int, int, int]) -> None:
        N = case[0]
        assert simulated("1f1b-as", *case).peak_activations == [N - i + 1 for i in range(1, N + 1)]
        assert simulated("fbp-as", *case).peak_activations == [2 * (N - i + 1) for i in range(1, N + 1)]

    def test_weights_memory(self, case: tuple[int, int, int, int, int]) -> None:
        assert simulated("1f1b-as", *case).weights_memory == [2] * case[0]
        assert simulated("fbp-as", *case).weights_memory == [2] * case[0]

    def test_bandwidth(self, case: tuple[int, int, int, int, int]) -> None:
        _, _, F, B, _ = case
        assert simulated("1f1b-as", *case).bandwidth_demand == pytest.approx(1 / F)
        assert simulated("fbp-as", *case).bandwidth_demand == pytest.approx(2 / (F + B))


@pytest.mark.parametrize("case", CASES, ids=IDS)
class TestTableII:
    """1F1B-SNO and 1F1B-SO."""

    def test_global_batch_time(self, case: tuple[int, int, int, int, int]) -> None:
        N, M, F, B, SR = case
        assert (
            simulated("1f1b-sno", *case).time == (M + N - 1) * (F + B) + (N + M - 2 - ceil((M - 1) / N)) * 2 * SR
        )
        assert simulated("1f1b-so", *case).time == (M + N - 1) * (F + B) + (N - 1) * 2 * SR

    def test_pipeline_bubble(self, case: tuple[int, int, int, int, int]) -> None:
        N, M, F, B, SR = case
        fill = (N - 1) * (F + B + 2 * SR)
        exposed = (M - 1 - ceil((M - 1) / N)) * 2 * SR
        no_overlap = Fraction(fill + exposed, M * (F + B) + fill + exposed)
        overlap = Fraction(fill, M * (F + B) + fill)
        assert simulated("1f1b-sno", *case).bubble == pytest.approx(float(no_overlap), abs=1e-14)
        assert simulated("1f1b-so", *case).bubble == pytest.approx(float(overlap), abs=1e-14)

    def test_features_memory(self, case: tuple[int, int, int, int, int]) -> None:
        N = case[0]
        assert simulated("1f1b-sno", *case).peak_activations == [N - i + 1 for i in range(1, N + 1)]
        assert simulated("1f1b-so", *case).peak_activations == [2 * (N - i + 1) for i in range(1, N + 1)]

    def test_weights_memory(self, case: tuple[int, int, int, int, int]) -> None:
        assert simulated("1f1b-sno", *case).weights_memory == [2] * case[0]
        assert simulated("1f1b-so", *case).weights_memory == [2] * case[0]

    def test_bandwidth(self, case: tuple[int, int, int, int, int]) -> None:
        assert simulated("1f1b-sno", *case).bandwidth_demand == pytest.approx(1 / case[2])
        assert simulated("1f1b-so", *case).bandwidth_demand == pytest.approx(1 / case[2])


@pytest.mark.parametrize("case", CASES, ids=IDS)
@pytest.mark.parametrize("name", ["1f1b-as", "fbp-as", "1f1b-sno", "1f1b-so"])
def test_printed_row(name: str, case: tuple[int, int, int, int, int]) -> None:
    """`paper_table_row` prints what the simulator finds, and the closed form knows that it holds."""
    got, row = simulated(name, *case), paper_table_row(name, *case)
    assert got.time == row["time"] == got.closed_form
    assert got.closed_form_valid
    assert got.bubble == pytest.approx(row["bubble"])
    assert got.peak_activations == row["activations"]
    assert got.bandwidth_demand == pytest.approx(row["bandwidth"])


def test_features_never_exceed_the_microbatches() -> None:
    """The paper leaves out the min with M."""
    assert simulated("1f1b-so", 4, 3, 10, 20, 5).peak_activations == [3, 3, 3, 2]
    assert simulated("fbp-as", 4, 3, 10, 20, 5).peak_activations == [3, 3, 3, 2]
