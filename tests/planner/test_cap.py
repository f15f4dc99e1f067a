"""K as a choice: what a plan then holds, what it takes, and where it cannot be chosen."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from bapipe.cli.plan import plan_command
from bapipe.errors import BaPipeError, InfeasibleError
from bapipe.fpga import explore_fpga
from bapipe.hardware.cluster_file import read_cluster
from bapipe.models.builtin import builtin_model
from bapipe.planner import Request, explore, make_plan
from bapipe.planner.inputs import profile_for
from bapipe.planner.pipelines import FAMILIES
from bapipe.records.plan import Plan
from bapipe.schedule.generators import capped, one_f_one_b_sno
from bapipe.schedule.inflight import declining_caps, full_overlap_caps
from bapipe.schedule.validate import require_valid
from bapipe.simulator.action_costs import Costs
from bapipe.simulator.simulate import simulate
from example_counts import examples


def plan_of(**request: object) -> Plan:
    cluster = read_cluster("4xv100")
    profile = profile_for("gnmt-8", cluster, microbatch=None, precision="fp32")
    return make_plan(explore(profile, cluster, Request(global_batch=256, microbatch=8, stages=4, **request)))  # type: ignore[arg-type]


def test_a_line_falls_to_one() -> None:
    assert declining_caps(4, [1] * 4, 64) == list(one_f_one_b_sno(4, 64).caps or ())
    assert declining_caps(7, [1] * 4, 64) == [7, 5, 3, 1]
    assert tuple(declining_caps(7, [1] * 4, 64)) == full_overlap_caps([1.0] * 4, [2.0] * 4, [1.0] * 3, [1.0] * 3)
    assert declining_caps(9, [1], 64) == [9]
    assert declining_caps(9, [1] * 3, 2) == [2, 2, 1]
    assert declining_caps(7, [2, 1, 4], 64) == [7, 5, 4]
    assert declining_caps(1, [1, 4], 64) == [4, 4]


@given(st.integers(1, 40), st.lists(st.integers(1, 4), min_size=1, max_size=6), st.integers(1, 24))
@settings(max_examples=examples(150), deadline=None)
def test_every_k_can_be_run(first: int, replicas: list[int], microbatches: int) -> None:
    caps = declining_caps(first, replicas, microbatches)
    assert caps == sorted(caps, reverse=True)
    assert max(caps) <= microbatches
    if set(replicas) == {1} and len(replicas) > 1 and first <= microbatches:
        slope = (first - 1) / (len(replicas) - 1)
        assert caps == [1 + math.ceil(slope * behind - 1e-9) for behind in range(len(replicas) - 1, -1, -1)]
    schedule = capped(len(replicas), microbatches, caps, replicas=replicas)
    require_valid(schedule)
    timeline = simulate(schedule, Costs.of(len(replicas), forward=1.0, backward=2.0, transfer=0.5))
    for live, cap in zip(timeline.peak_in_flight(), schedule.caps or (), strict=True):
        assert live <= cap


def test_the_search_counts_what_the_schedule_holds() -> None:
    for cap in (1, 3, 4, 7, 30):
        family = replace(FAMILIES["1f1b"], cap=cap)
        held = [family.inflight(behind, 5, 12) for behind in range(5, 0, -1)]
        assert held == declining_caps(cap, [1] * 5, 12)
    assert replace(FAMILIES["1f1b"], cap=9).inflight(1, 1, 4) == 4


def test_k_changes_in_flight_micro_batches_memory_and_time() -> None:
    lean, usual, rich = (plan_of(cap=cap) for cap in (2, 4, 10))
    for plan, caps in ((lean, (2, 2, 2, 1)), (usual, (4, 3, 2, 1)), (rich, (10, 7, 4, 1))):
        assert (plan.schedule.name, plan.schedule.caps) == ("1f1b", caps)
        assert tuple(stage.in_flight for stage in plan.stages) == caps
        for stage, live in zip(plan.stages, caps, strict=True):
            static = 2 * stage.weight_bytes + stage.buffer_bytes + stage.workspace_bytes
            assert not stage.recompute
            assert stage.memory_bytes == pytest.approx(static + live * stage.saved_bytes, rel=1e-12)
    totals = [sum(stage.memory_bytes for stage in plan.stages) for plan in (lean, usual, rich)]
    assert totals == sorted(totals)
    assert totals[0] < totals[2]
    assert lean.prediction.time > usual.prediction.time > rich.prediction.time


def test_k_holds_where_it_does_not_fit() -> None:
    """What is asked for is not lowered to what fits, as the least K is."""
    cluster = read_cluster("4xv100")
    profile = profile_for("vgg16", cluster, microbatch=None, precision="fp32")
    usual = Request(global_batch=1024, microbatch=32, strategy="uniform", schedule="1f1b")
    assert explore(profile, cluster, usual).best.short is None
    with pytest.raises(InfeasibleError, match=r"the closest, 1f1b with K = 32, 4 stages"):
        explore(profile, cluster, replace(usual, cap=32))
    recomputing = explore(profile, cluster, replace(usual, cap=32, strategy="exact", stages=4)).best
    assert recomputing.inflight[0] == 32
    first, layers = recomputing.candidate.stages[0], recomputing.candidate.chain.recompute
    assert first.recompute or any(run[0] <= first.last for run in layers)
    whole = replace(usual, cap=32, strategy="exact", stages=4, recompute="stages")
    assert recomputing.throughput >= explore(profile, cluster, whole).best.throughput


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"cap": 0}, "--in-flight must be at least 1, got 0"),
        ({"cap": 3, "schedule": "gpipe"}, "--in-flight belongs to the schedule 1f1b; gpipe sets its own K"),
        ({"cap": 3, "strategy": "dp"}, "--in-flight belongs to the schedule 1f1b, strategy dp has its own"),
        ({"cap": 3, "space": "paper"}, "the paper's space has 1f1b-sno and 1f1b-so, with K of N and 2N; leave"),
    ],
)
def test_where_there_is_no_k_to_choose(values: dict[str, object], words: str) -> None:
    with pytest.raises(BaPipeError, match=words):
        Request(**values)  # type: ignore[arg-type]


def test_fpgas_have_no_k_to_choose() -> None:
    with pytest.raises(BaPipeError, match=r"--in-flight belongs to the schedule 1f1b, which does not suit FPGAs"):
        explore_fpga(builtin_model("alexnet"), read_cluster("2xvcu118"), Request(cap=3))


def test_the_command_takes_k_and_compares_without_it_where_there_is_none() -> None:
    words = ["alexnet", "--cluster", "2xv100", "--global-batch", "32", "--cap", "2", "--json"]
    alone, compared = (
        json.loads(CliRunner().invoke(plan_command, [*words, *more], catch_exceptions=False).stdout)
        for more in ([], ["--compare"])
    )
    assert (alone["schedule"], alone["caps"][0]) == ("1f1b", 2)
    schedules = {row["strategy"]: row["schedule"] for row in compared["strategies"]}
    assert (schedules["exact"], schedules["gpipe"], schedules["dp"]) == ("1f1b", "gpipe", "data-parallel")
