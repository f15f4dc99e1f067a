"""Interleaving with unequal numbers of stages per accelerator, and on accelerators of several types."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bapipe.costs.segments import make_chain
from bapipe.errors import BaPipeError
from bapipe.planner import Request, explore, make_plan
from bapipe.planner.candidate import Hardware
from bapipe.planner.interleaved_pipelines import looped_pipelines
from bapipe.planner.looped_cuts import balanced_ranks, looped_bound
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.records.plan import read_plan, write_plan
from bapipe.reporting.drawing.timeline_svg import render_svg
from bapipe.schedule.generators import with_update
from bapipe.schedule.validate import require_valid
from made_profiles import made_cluster, made_profile

MIXED = made_profile({"x": [1.0] * 15, "y": [2.0] * 15})


def test_cuts_give_ranks_as_much_as_they_are_fast() -> None:
    chain = make_chain(MIXED, ["x", "y"], 1)
    assert balanced_ranks(chain, (0, 1, 0), (0, 1), 8) == (4, 9, 14)
    assert looped_bound(chain, (0, 1, 0), (0, 1), (4, 9, 14), 8) == pytest.approx(5.0 + 80.0)
    assert looped_bound(chain, (0, 1, 0), (0, 1), (4, 7, 14), 8) == pytest.approx(96.0)


def test_no_order_beats_the_bound() -> None:
    rng = np.random.default_rng(5)
    for _ in range(4):
        work = rng.uniform(0.5, 2.0, 9)
        profile = made_profile({"x": work.tolist(), "y": (1.7 * work).tolist()})
        chain, cluster = make_chain(profile, ["x", "y"], 1), made_cluster({"x": 2, "y": 1}, bandwidth=1e6)
        made = looped_pipelines(chain, Hardware(cluster=cluster), 6, ranks=3)
        assert made
        for own in made:
            stages, schedule = own.candidate.stages, own.candidate.schedule
            ranks = tuple(rank for (rank,) in schedule.placement)
            bound = looped_bound(chain, ranks, (0, 0, 1), tuple(stage.last for stage in stages), 6)
            assert own.time >= bound * (1 - 1e-9)
            require_valid(with_update(schedule), sends="windowed")


def test_the_fast_accelerator_has_more_stages(tmp_path: Path) -> None:
    """A straight pipeline of two stages fills and drains longer."""
    cluster = made_cluster({"y": 1, "x": 1}, bandwidth=1e6)
    profile = made_profile({"x": [1.0] * 3, "y": [2.0] * 3})
    request = Request(global_batch=4, microbatch=1, schedule="interleaved")
    found = explore(profile, cluster, request)
    best = found.best
    assert [len(best.schedule.stages_of(rank)) for rank in range(2)] == [2, 1]
    assert best.candidate.stages[0].accelerators == (1,), "the fast one comes first"
    straight = explore(profile, cluster, Request(global_batch=4, microbatch=1, schedule="1f1b", stages=2)).best
    assert best.time < straight.time
    plan = make_plan(found)
    write_plan(plan, tmp_path / "plan.json")
    again = read_plan(tmp_path / "plan.json")
    assert again.schedule.to_schedule() == plan.schedule.to_schedule()
    assert plan_timeline(again).time == pytest.approx(best.timeline.time)
    assert render_svg(plan_timeline(again)).startswith("<svg")


def test_unequal_numbers_are_chosen_where_layers_do_not_go_round() -> None:
    """Five equal layers on three accelerators: 2, 2 and 1, where 2 each would need six."""
    profile = made_profile({"x": [1.0] * 5})
    request = Request(global_batch=6, microbatch=1, schedule="interleaved")
    best = explore(profile, made_cluster({"x": 3}, bandwidth=1e6), request).best
    assert [len(best.schedule.stages_of(rank)) for rank in range(3)] == [2, 2, 1]
    assert "2-2-1 stages" in best.candidate.label


def test_orders_keep_to_the_memory() -> None:
    profile = made_profile({"x": [1.0] * 6}, saved_activations=[10.0] * 6, weights=[1.0] * 6)
    request = Request(global_batch=8, microbatch=1, schedule="interleaved")
    wide = explore(profile, made_cluster({"x": 3}, memory=1e9), request).best
    memory = 0.8 * max(wide.memory)
    best = explore(profile, made_cluster({"x": 3}, memory=memory), request).best
    assert max(best.memory) <= memory
    assert best.time >= wide.time


def test_a_chain_of_accelerators_is_refused() -> None:
    request = Request(global_batch=8, microbatch=1, schedule="interleaved")
    cluster = made_cluster({"x": 2})
    with pytest.raises(BaPipeError, match="each connected to any other"):
        explore(made_profile({"x": [1.0] * 6}), replace(cluster, topology="chain"), request)
