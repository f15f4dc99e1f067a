"""Plans of models with frozen parameters: memory, gradient sync and the way back are those of what is trained."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from bapipe.costs.profile import Profile
from bapipe.costs.segments import make_chain
from bapipe.errors import InfeasibleError
from bapipe.planner import Request, explore, make_plan
from bapipe.planner.candidate import Hardware
from bapipe.planner.evaluate import evaluate
from bapipe.planner.gradient_rings import all_reduce_time
from bapipe.planner.plan_cases import PlanCases
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.planner.planned_order import PlannedOrder
from bapipe.planner.stage_tables import StageTables
from made_profiles import frozen, made_cluster, made_profile

WEIGHTS = [8e6, 40e6, 40e6, 40e6, 40e6, 8e6]
TRAINED = [0.0, 0.0, 0.0, 4e5, 4e5, 0.0]


def _profile(trained: list[float] | None = TRAINED) -> Profile:
    made = made_profile(
        {"gpu": [1.0, 3.0, 3.0, 3.0, 3.0, 2.0]},
        weights=WEIGHTS,
        boundary=[3e6] * 6,
        saved_activations=[1e6] * 6,
        sizes=(1, 2),
    )
    return made if trained is None else frozen(made, trained)


REQUEST = Request(global_batch=8, microbatch=1, optimizer="adam")


def test_a_plan_that_did_not_fit_now_does() -> None:
    """The limit is between what frozen weights need and what training all of them would."""
    cluster = made_cluster({"gpu": 2}, memory=140e6)
    with pytest.raises(InfeasibleError, match="nothing fits"):
        explore(_profile(None), cluster, REQUEST)
    # One stage per accelerator, whose memory is then that of the stage.
    plan = make_plan(explore(_profile(), cluster, replace(REQUEST, schedule="1f1b-sno")))
    for stage in plan.stages:
        own = slice(stage.first_layer, stage.last_layer + 1)
        assert stage.weight_bytes == sum(WEIGHTS[own])
        parts = stage.memory_parts
        assert parts is not None
        assert parts.weights == sum(WEIGHTS[own])
        assert parts.optimizer == 2 * sum(TRAINED[own])
        assert parts.gradients <= sum(TRAINED[own])
    assert any("weights are trained: the rest is frozen" in note for note in plan.notes)


def test_a_plan_of_a_model_that_is_all_trained_is_as_without_the_field() -> None:
    cluster = made_cluster({"gpu": 2}, bandwidth=1e7, memory=1e9)
    told = make_plan(explore(_profile(WEIGHTS), cluster, REQUEST))
    weighted = replace(_profile(None).accelerators["gpu"], weight_gradient=_weight_gradient())
    same = replace(_profile(None), accelerators={"gpu": weighted})
    plain = make_plan(explore(same, cluster, REQUEST))
    assert told.stages == plain.stages
    assert told.prediction == plain.prediction


def _weight_gradient() -> tuple[tuple[float, ...], ...]:
    table = _profile(WEIGHTS).accelerators["gpu"]
    assert table.weight_gradient is not None
    return table.weight_gradient


@pytest.mark.parametrize("name", ["1f1b-sno", "zb-h1"])
def test_the_plan_says_where_no_gradient_comes_back(name: str) -> None:
    cluster = made_cluster({"gpu": 2}, bandwidth=1e7)
    plan = make_plan(
        explore(_profile(), cluster, replace(REQUEST, schedule=name, stages=2, strategy="parameters"))
    )
    first, second = plan.stages
    assert first.last_layer == 2, "as many weights in either stage"
    assert (first.trainable_bytes, second.trainable_bytes) == (0.0, 8e5)
    assert not second.sends_gradient
    assert (first.backward, first.update, second.send_backward_bytes) == (0.0, 0.0, 0.0)
    timeline = plan_timeline(plan)
    assert timeline.time == pytest.approx(plan.prediction.time)
    assert len(timeline.transfers) == plan.microbatches, "activations only"
    assert timeline.end[timeline.ranks == 0].max() == pytest.approx(8 * first.forward)


def test_replicas_sum_gradients_of_what_is_trained() -> None:
    cluster = made_cluster({"gpu": 2}, bandwidth=1e7)
    request = replace(REQUEST, schedule="data-parallel")
    plan, whole = (make_plan(explore(_profile(own), cluster, request)) for own in (TRAINED, None))
    assert plan.stages[0].all_reduce == pytest.approx(all_reduce_time(cluster, (0, 1), sum(TRAINED)))
    assert whole.stages[0].all_reduce > 50 * plan.stages[0].all_reduce


@pytest.mark.parametrize("order", ["1f1b-sno", "zb"])
def test_many_cuts_are_timed_and_bounded_as_each_alone(order: str) -> None:
    """Cuts before, in and behind the frozen layers, replicas too."""
    chain = make_chain(_profile(), ["gpu"], 1)
    hardware = Hardware(cluster=made_cluster({"gpu": 3}, bandwidth=1e7))
    for counts in ((1, 1, 1), (2, 1), (1, 2)):
        cuts = [(*own, 5) for own in itertools.combinations(range(5), len(counts) - 1)]
        cases = PlanCases(
            tables=StageTables(chain),
            hardware=hardware,
            microbatches=6,
            counts=counts,
            cuts=np.array(cuts),
            orders=np.tile(np.arange(3), (len(cuts), 1)),
        )
        if order == "zb" and max(counts) > 1:
            continue
        caps = tuple(int(sum(counts[index:])) for index in range(len(counts)))
        delays = (0,) * len(counts) if order == "zb" else None
        planned = PlannedOrder(name=order, counts=counts, microbatches=6, caps=caps, delays=delays)
        times = cases.times(planned, np.arange(len(cuts)))
        assert times is not None
        alone = [evaluate(cases.candidate(case, planned, "one"), hardware) for case in range(len(cuts))]
        assert times.tolist() == pytest.approx([own.timeline.time for own in alone], rel=1e-12)
        assert (cases.bound(planned) <= times * (1 + 1e-12)).all()
        fits = cases.may_fit(planned)
        assert all(fit for fit, own in zip(fits.tolist(), alone, strict=True) if own.short is None)
