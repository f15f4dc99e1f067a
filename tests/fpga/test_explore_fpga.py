"""Planning FPGA clusters: Table VI, the schedule's choice, closed forms, deployment, alternatives, refusals."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from bapipe.errors import BaPipeError, InfeasibleError
from bapipe.fpga import (
    DP_VARIANTS,
    PAPER_SPEEDUP,
    Parameters,
    explore_fpga,
    make_fpga_plan,
    parse_assumptions,
    simulated,
    table6,
)
from bapipe.fpga.outcome import dimension
from bapipe.hardware.cluster_file import read_cluster
from bapipe.models.builtin import builtin_model
from bapipe.planner import Request
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.records.plan import read_plan, write_plan
from fpga_cases import board_type, chain_of, cluster_of, conv_model

CHAIN = conv_model([(8, 32, 3, 16, 16), (32, 32, 3, 16, 16), (32, 48, 3, 16, 16), (48, 64, 1, 16, 16)])
LIKE = conv_model([(16, 32, 3, 12, 12)] + [(32, 32, 3, 12, 12)] * 7)


@pytest.fixture(scope="module")
def rows() -> dict[str, object]:
    return {row.cluster: row for row in table6()}


@pytest.mark.parametrize("cluster", PAPER_SPEEDUP)
def test_table_6_from_one_set_of_parameters(rows: dict[str, object], cluster: str) -> None:
    """A calibration: clock · utilisation was fitted, so this shows that one set of constants suffices."""
    row = rows[cluster]
    assert row.speedup == pytest.approx(row.paper, rel=0.05)  # type: ignore[attr-defined]
    assert (row.schedule, row.microbatch) == ("fbp-as", 1)  # type: ignore[attr-defined]
    assert set(row.data_parallel) == set(DP_VARIANTS)  # type: ignore[attr-defined]


def test_a_better_data_parallel_baseline_removes_the_gain(rows: dict[str, object]) -> None:
    for row in rows.values():
        for variant in ("greedy-on-chip", "batched-reuse"):
            assert row.data_parallel[variant] <= row.time  # type: ignore[attr-defined]


@pytest.mark.parametrize("schedule", ["fbp-as", "1f1b-as"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_table_1_is_what_the_simulator_says(schedule: str, count: int) -> None:
    found = explore_fpga(LIKE, cluster_of(count), Request(global_batch=24, schedule=schedule))
    best = found.best
    M, N = best.rule.microbatches, len(best.loads)
    _, timeline = simulated(best, found.cluster)
    assert best.update == 0
    assert timeline.time == pytest.approx((M + N - 1) * best.period, rel=1e-12)
    assert timeline.time == pytest.approx(best.time, rel=1e-12)
    each = 2 if schedule == "fbp-as" else 1
    assert [load.images for load in best.loads] == [
        best.rule.microbatch * min(M, each * (N - stage)) for stage in range(N)
    ]


def test_a_slow_link_stretches_the_first_and_last_slots_too() -> None:
    found = explore_fpga(LIKE, cluster_of(3, link=2e7), Request(global_batch=12, schedule="fbp-as", stages=3))
    _, timeline = simulated(found.best, found.cluster)
    assert found.best.binding[0] == "link"
    assert timeline.time == pytest.approx(found.best.time, rel=1e-12)


def test_1f1b_wins_where_features_spill_and_layers_need_no_refill() -> None:
    """Twice the features in flight cost fbp-as DDR time; without refill 1f1b-as has nothing to pay."""
    cluster = cluster_of(4, ram=2e5, ddr_bandwidth=2e9, dsp=4000)
    found = explore_fpga(LIKE, cluster, Request(global_batch=32), parameters=Parameters(refill=0.0))
    assert found.best.rule.schedule == "1f1b-as"
    assert "half the activations" in make_fpga_plan(found).notes[0]
    again = explore_fpga(LIKE, cluster_of(4), Request(global_batch=32))
    assert again.best.rule.schedule == "fbp-as"
    assert "streams on" in make_fpga_plan(again).notes[0]


def test_a_faster_alternative_is_said_with_why_it_is_not_the_plan() -> None:
    found = explore_fpga(LIKE, cluster_of(4), Request(global_batch=16))
    plan = make_fpga_plan(found)
    faster = [item for item in plan.alternatives if item.time is not None and item.time < plan.prediction.time]
    assert faster
    assert all("by formula" in item.reason and "needs images at every board" in item.reason for item in faster)
    assert any("cannot be this plan" in note and "4, 4, 4, 4 of 16" in note for note in plan.notes)
    slower = [item for item in plan.alternatives if item not in faster]
    assert not any("by formula" in item.reason for item in slower)


def test_fluid_is_never_slower_than_whole_tiles() -> None:
    for count in (1, 2, 3):
        whole = explore_fpga(CHAIN, cluster_of(count), Request(global_batch=16))
        fluid = explore_fpga(
            CHAIN, cluster_of(count), Request(global_batch=16), parameters=Parameters(allocation="fluid")
        )
        assert fluid.best.time <= whole.best.time * (1 + 1e-9)
        assert fluid.lower_bound == whole.lower_bound <= fluid.best.time


def test_more_of_the_network_goes_to_the_larger_board() -> None:
    large, small = board_type("large", dsp=3000), board_type("small", dsp=1000)
    found = explore_fpga(CHAIN, chain_of([large, small]), Request(global_batch=64))
    macs = [float(found.units.macs[load.stop] - found.units.macs[load.first]) for load in found.best.loads]
    assert macs[0] / macs[1] == pytest.approx(3, rel=0.15)
    assert any(stage.fractions for stage in make_fpga_plan(found).stages)


def test_the_paper_s_steps_are_no_better_than_the_exact_search() -> None:
    for kinds in ([board_type()] * 3, [board_type("a", dsp=500), board_type("b", dsp=2000)]):
        times = {
            name: explore_fpga(CHAIN, chain_of(kinds), Request(global_batch=32, strategy=name)).best.time
            for name in ("exact", "bapipe", "uniform", "time")
        }
        assert times["exact"] <= min(times.values()) * (1 + 1e-9)


def test_parking_shortens_what_ddr_binds_and_fills_the_neighbour() -> None:
    model = conv_model([(8, 16, 3, 24, 24), (16, 16, 3, 24, 24), (16, 64, 1, 4, 4), (64, 256, 3, 4, 4)])
    cluster = cluster_of(2, ram=4e5, ddr_bandwidth=1e8, dsp=2000)
    request = Request(global_batch=16, schedule="fbp-as", stages=2)
    run = explore_fpga(model, cluster, request, parameters=Parameters(slices=1)).best.run
    plain = dimension(run, 0, (3, 4))
    parked = dimension(dataclasses.replace(run, parameters=Parameters(slices=1, parking=True)), 0, (3, 4))
    assert plain.binding == ("ddr", 1)
    assert parked.parked
    assert parked.period < plain.period
    assert parked.loads[1].ddr < plain.loads[1].ddr
    host = parked.parked[0].host
    free = parked.loads[host].board.ram - sum(
        float(getattr(parked.loads[host].spill, name)) for name in ("weights_on", "gradients_on", "features_on")
    ) - float(parked.loads[host].demand.buffers)  # fmt: skip
    assert sum(item.bytes for item in parked.parked if item.host == host) <= free * (1 + 1e-9)


def test_a_plan_can_be_written_read_and_timed_again(tmp_path) -> None:  # type: ignore[no-untyped-def]
    found = explore_fpga(builtin_model("resnet18", granularity="conv"), read_cluster("2xvcu118"))
    plan = make_fpga_plan(found)
    write_plan(plan, tmp_path / "plan.json")
    again = read_plan(tmp_path / "plan.json")
    assert again == plan
    assert plan_timeline(again).time == pytest.approx(plan.prediction.time, rel=1e-12)
    assert again.deployment is not None
    board = again.deployment.boards[1]
    assert {item.module for item in board.modules} == {"FP", "EB", "WG"}
    assert all(item.tn and item.tm and item.tk for item in board.modules)
    held = {stage.accelerators[0]: set(stage.layers) for stage in again.stages}
    for one in again.deployment.boards:
        assert {item.layer for item in one.placed} <= held[one.accelerator]
        assert {fifo.layer for fifo in one.fifos} <= held[one.accelerator]
    assert [use.to for use in board.links] == ["node0/0"]


def test_stages_share_every_layer_whole() -> None:
    plan = make_fpga_plan(explore_fpga(CHAIN, cluster_of(4), Request(global_batch=16)))
    shares: dict[int, list[tuple[int, int, int]]] = {}
    for stage in plan.stages:
        parts = {part.layer: (part.start, part.stop, part.of) for part in stage.fractions}
        for layer in range(stage.first_layer, stage.last_layer + 1):
            shares.setdefault(layer, []).append(parts.get(layer, (0, 1, 1)))
    assert sorted(shares) == list(range(len(CHAIN.layers)))
    for parts_of in shares.values():
        assert parts_of[0][0] == 0
        assert parts_of[-1][1] == parts_of[-1][2]
        assert all(one[1] == other[0] for one, other in itertools.pairwise(parts_of))


def test_data_parallel_shares_finish_together() -> None:
    found = explore_fpga(CHAIN, chain_of([board_type("a", dsp=3000), board_type("b")]), Request(global_batch=100))
    for alternative in found.alternatives:
        assert sum(item.images for item in alternative.replicas) == 100
        assert alternative.time is not None
        seconds = [max(item.compute, item.ddr) for item in alternative.replicas]
        ends = [item.images * time for item, time in zip(alternative.replicas, seconds, strict=True)]
        assert max(ends) - min(ends) <= max(seconds)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(strategy="pipedream"), "strategy pipedream is not for FPGA clusters"),
        (Request(schedule="gpipe"), "schedule gpipe does not suit FPGAs"),
        (Request(schedule="data-parallel"), "data parallelism is among the alternatives"),
        (Request(stages=9), "9 stages need as many boards, the cluster has 2"),
        (Request(microbatch=48), "a global batch of 128 is no multiple of a micro-batch of 48"),
    ],
)
def test_what_is_forced_is_honoured_or_refused(request_: Request, message: str) -> None:
    with pytest.raises(BaPipeError, match=message):
        explore_fpga(CHAIN, cluster_of(2), request_)


def test_what_fits_nowhere_says_what_is_short() -> None:
    with pytest.raises(InfeasibleError, match=r"layer 'conv0' needs at least .* and no board has DDR"):
        explore_fpga(CHAIN, cluster_of(2, ram=2e3, ddr=0, ddr_bandwidth=0))
    with pytest.raises(InfeasibleError, match="11 modules need a DSP each, the boards have 8"):
        explore_fpga(CHAIN, cluster_of(2, dsp=4))
    with pytest.raises(InfeasibleError, match=r"FIFOs of layer 'conv2' take .* on chip, the largest RAM is 1 kB"):
        explore_fpga(CHAIN, cluster_of(2, ram=1e3))
    with pytest.raises(InfeasibleError, match="does not fit"):
        explore_fpga(CHAIN, cluster_of(2, ram=4e4, ddr=1e4))
    nothing = dataclasses.replace(board_type(), board={})
    with pytest.raises(BaPipeError, match="has no DSPs"):
        explore_fpga(CHAIN, chain_of([nothing]))
    with pytest.raises(BaPipeError, match="works in fp16, got fp32"):
        explore_fpga(CHAIN, cluster_of(1), dtype="fp32")


def test_links_beyond_the_transceivers_are_refused() -> None:
    kind = board_type()
    wired = dataclasses.replace(kind, board={**kind.board, "gty": 4.0})
    with pytest.raises(BaPipeError, match=r"node0/1 ask for 160 Gb/s each way, the transceivers .* carry 131"):
        explore_fpga(CHAIN, chain_of([wired] * 3, link=10e9))


def test_assumptions_are_parsed_or_refused() -> None:
    assert parse_assumptions(["allocation=fluid", "reuse = 4", "parking=yes"]) == Parameters(
        allocation="fluid", reuse=4, parking=True
    )
    for text, message in (
        ("alocation=fluid", "did you mean 'allocation'"),
        ("slices=x", "must be a whole number"),
        ("slices=0", "must be from 1 to 64"),
        ("parking=maybe", "true or false"),
        ("allocation=best", "integer or fluid"),
        ("ddr_efficiency=2", "at most 1"),
    ):
        with pytest.raises(BaPipeError, match=message):
            parse_assumptions([text])


def test_shared_passes_need_images_that_are_live_together() -> None:
    cluster = cluster_of(2, ram=3e4, ddr_bandwidth=1e8)
    times = [
        explore_fpga(
            CHAIN,
            cluster,
            Request(global_batch=16, schedule="fbp-as", microbatch=1),
            parameters=Parameters(reuse=reuse),
        ).best.period
        for reuse in (1, 2, 4, 64)
    ]
    assert times[0] > times[1] >= times[2] == times[3]


def test_coarse_places_to_cut_leave_no_board_empty() -> None:
    """The paper's steps cut in sixteenths; rounded to quarters two cuts may fall on one place."""
    model = conv_model([(1, 9, 1, 2, 2), (9, 2, 1, 2, 2), (2, 2, 1, 2, 2), (2, 8, 5, 2, 2)])
    for strategy in ("exact", "bapipe", "uniform", "time"):
        for slices in (1, 2, 4):
            found = explore_fpga(
                model,
                cluster_of(3, dsp=20, ram=3e4),
                Request(global_batch=8, strategy=strategy),
                parameters=Parameters(slices=slices),
            )
            assert all(load.stop > load.first for load in found.best.loads)
