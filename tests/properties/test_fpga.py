"""FPGA plans over random networks and boards: nothing exceeds a board, more never hurts, the optimum is one."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bapipe.analysis.what_if import changed
from bapipe.errors import InfeasibleError
from bapipe.fpga import FpgaExploration, Parameters, explore_fpga, make_fpga_plan, simulated
from bapipe.fpga.outcome import dimension
from bapipe.hardware.cluster import Cluster
from bapipe.models.layers import Model
from bapipe.planner import Request
from example_counts import examples
from fpga_cases import board_type, chain_of, conv_model

FLUID = Parameters(allocation="fluid", slices=2)


@st.composite
def models(draw: st.DrawFn) -> Model:
    count = draw(st.integers(2, 5))
    channels = [draw(st.integers(1, 24)) for _ in range(count + 1)]
    side = draw(st.integers(2, 14))
    kernels = [draw(st.sampled_from([1, 3, 5])) for _ in range(count)]
    return conv_model([(channels[i], channels[i + 1], kernels[i], side, side) for i in range(count)])


@st.composite
def clusters(draw: st.DrawFn, *, ddr: bool = False) -> Cluster:
    kinds = [
        board_type(
            name,
            dsp=draw(st.integers(20, 3000)),
            ram=draw(st.sampled_from([3e4, 1e5, 1e6])),
            ddr=1e9 if ddr else draw(st.sampled_from([0.0, 1e5, 1e9])),
            ddr_bandwidth=draw(st.sampled_from([1e8, 1e9, 1e10])),
        )
        for name in ("one", "other")
    ]
    chosen = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4))
    return chain_of(chosen, link=draw(st.sampled_from([1e7, 1e8, 1e10])))


def planned(model: Model, cluster: Cluster, parameters: Parameters) -> FpgaExploration | None:
    try:
        return explore_fpga(model, cluster, Request(global_batch=8), parameters=parameters)
    except InfeasibleError:
        return None


@settings(max_examples=examples(40), deadline=None)
@given(models(), clusters(), st.sampled_from(["integer", "fluid"]), st.booleans())
def test_no_board_is_asked_for_more_than_it_has(
    model: Model, cluster: Cluster, allocation: str, park: bool
) -> None:
    parameters = Parameters(allocation=allocation, slices=4, parking=park)  # type: ignore[arg-type]
    found = planned(model, cluster, parameters)
    if found is None:
        return
    deployment = make_fpga_plan(found).deployment
    assert deployment is not None
    more = 1 + 1e-9
    for board in deployment.boards:
        dsps = board.dsp_forward + board.dsp_error + board.dsp_gradient
        assert dsps == pytest.approx(sum(module.dsp for module in board.modules))
        if board.modules and allocation == "fluid":
            assert dsps == pytest.approx(board.dsp_installed)
        assert dsps <= board.dsp_installed * more
        assert board.efficiency <= more
        assert all(module.efficiency <= more for module in board.modules)
        on_chip = (
            board.ram_weights + board.ram_gradients + board.ram_features + board.ram_hosted + board.ram_buffers
        )
        assert on_chip <= board.ram_usable * more
        assert board.ddr_used <= board.ddr_installed * more
        assert board.ddr_rate <= board.ddr_bandwidth * more
        for name in {use.to for use in board.links}:
            uses = [use for use in board.links if use.to == name]
            assert sum(use.rate for use in uses) <= uses[0].bandwidth * more
        assert max(board.compute, board.ddr) <= board.interval * more


@settings(max_examples=examples(30), deadline=None)
@given(models(), clusters())
def test_every_byte_lies_somewhere(model: Model, cluster: Cluster) -> None:
    found = planned(model, cluster, Parameters(slices=4))
    if found is None:
        return
    plan = make_fpga_plan(found)
    assert plan.deployment is not None
    for what in ("weights", "gradients"):
        placed = sum(item.bytes for board in plan.deployment.boards for item in board.placed if item.what == what)
        assert placed == pytest.approx(2.0 * model.parameters, rel=1e-6)
    for load, board in zip(found.best.loads, plan.deployment.boards, strict=True):
        features = [item for item in board.placed if item.what == "features"]
        assert sum(item.bytes for item in features) == pytest.approx(
            float(load.demand.features) * load.images, rel=1e-6
        )
        off = sum(item.bytes for item in board.placed if item.where == "ddr")
        assert off == pytest.approx(board.ddr_used, rel=1e-6, abs=1.0)


@settings(max_examples=examples(40), deadline=None)
@given(models(), clusters(), st.sampled_from(["integer", "fluid"]))
def test_the_simulator_confirms_the_closed_form(model: Model, cluster: Cluster, allocation: str) -> None:
    found = planned(model, cluster, Parameters(allocation=allocation, slices=4))  # type: ignore[arg-type]
    if found is None:
        return
    for outcome in found.by_schedule.values():
        _, timeline = simulated(outcome, cluster)
        assert timeline.time == pytest.approx(outcome.time, rel=1e-9)


FIGURES = ("board.dsp", "board.ram", "board.ddr", "link")


@settings(max_examples=examples(40), deadline=None)
@given(models(), clusters(ddr=True), st.sampled_from(FIGURES), st.sampled_from([1.1, 2.0, 7.0]))
def test_more_of_a_resource_never_makes_the_best_plan_slower(
    model: Model, cluster: Cluster, figure: str, factor: float
) -> None:
    before = planned(model, cluster, FLUID)
    if before is None:
        return
    larger = cluster
    for name, kind in cluster.types.items():
        now = {
            "board.dsp": kind.board["dsp"],
            "board.ram": kind.board["on_chip_bytes"],
            "board.ddr": kind.memory_bandwidth,
        }
        if figure != "link":
            value = round(now[figure] * factor) if figure == "board.dsp" else now[figure] * factor
            larger = changed(larger, figure.replace("board", name), value)
    if figure == "link":
        larger = changed(cluster, "link", cluster.within.bandwidth * factor)
    after = planned(model, larger, FLUID)
    assert after is not None
    assert after.best.time <= before.best.time * (1 + 1e-8)


@settings(max_examples=examples(25), deadline=None)
@given(models(), clusters(), st.sampled_from(["fbp-as", "1f1b-as"]), st.sampled_from([1, 2]))
def test_the_exact_search_finds_what_trying_all_cuts_finds(
    model: Model, cluster: Cluster, schedule: str, microbatch: int
) -> None:
    request = Request(global_batch=8, schedule=schedule, microbatch=microbatch)
    try:
        found = explore_fpga(model, cluster, request, parameters=FLUID)
    except InfeasibleError:
        found = None
    fastest = float("inf")
    example = found or explore_fpga(model, chain_of([board_type()] * len(cluster)), request, parameters=FLUID)
    units, run = example.units, example.best.run
    boards = found.boards if found else explore_boards(cluster)
    count = len(boards)
    for depth in range(1, min(count, len(units)) + 1):
        for offset in range(count - depth + 1):
            own = dataclasses.replace(
                run,
                boards=boards[offset : offset + depth],
                links=tuple(cluster.link(index, index + 1) for index in range(offset, offset + depth - 1)),
            )
            for inner in itertools.combinations(range(1, len(units)), depth - 1):
                outcome = dimension(own, offset, (*inner, len(units)))
                if outcome.fits:
                    fastest = min(fastest, outcome.time)
    if found is None:
        assert fastest == float("inf")
    else:
        assert found.best.time == pytest.approx(fastest, rel=1e-8)


def explore_boards(cluster: Cluster):  # type: ignore[no-untyped-def]
    from bapipe.fpga import boards_of

    return boards_of(cluster, dtype="fp16")
