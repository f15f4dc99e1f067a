"""A machine whose layers and links are not those of the files: short runs tell, and other plans are predicted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bapipe.analysis.calibrate import Calibrated, ShortRun, calibrate
from bapipe.analysis.recalibrate import fit_profile, predict_again
from bapipe.costs.profile import Profile
from bapipe.hardware.cluster import Cluster, CollectiveRates
from bapipe.planner import Request, explore, make_plan
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.records.plan import Plan
from made_profiles import made_cluster, made_profile
from made_runs import made_run

LAYERS = 8
SIZES = (1, 2, 4)


def filed() -> tuple[Profile, Cluster]:
    """What the files say: layers of 1 to 2 s per sample, links of 50 bytes/s without latency."""
    profile = made_profile(
        {"x": [1.0 + place / 8 for place in range(LAYERS)]}, boundary=[10.0] * LAYERS, weights=[40.0] * LAYERS
    )
    return profile, made_cluster({"x": 2}, bandwidth=50.0)


def true() -> tuple[Profile, Cluster]:
    """What the machine does: a call takes 0.8 of a sample's work more, and a sample 1.2 of it; links far slower.

    So layers take 2 times as long as filed at one sample, 1.6 times at two and 1.4 times at four.
    """
    profile, cluster = filed()
    table = profile.table("x")
    factor = (1.2 + 0.8 / np.array(SIZES))[:, None]
    slower = {name: tuple(map(tuple, np.array(getattr(table, name)) * factor)) for name in ("forward", "backward")}
    links = replace(cluster.within, bandwidth=20.0, latency=0.5)
    return replace(profile, accelerators={"x": replace(table, **slower)}), replace(cluster, within=links)


def planned(profile: Profile, cluster: Cluster, **request: object) -> Plan:
    return make_plan(explore(profile, cluster, Request(**request)))  # type: ignore[arg-type]


def ran(plan: Plan) -> ShortRun:
    """The plan on the true machine."""
    timeline = plan_timeline(predict_again(plan, *true()))
    return ShortRun(plan=plan, records=(made_run(plan, timeline),) * 2, seconds=timeline.time)


def both_sizes() -> list[Plan]:
    profile, cluster = filed()
    return [
        planned(profile, cluster, global_batch=8 * size, microbatch=size, schedule="1f1b-sno", stages=2)
        for size in (1, 4)
    ]


def calibrated() -> Calibrated:
    return calibrate(*filed(), [ran(plan) for plan in both_sizes()])


def test_layers_and_links_are_those_of_the_machine() -> None:
    found, (profile, cluster) = calibrated(), true()
    for name in ("forward", "backward"):
        assert np.allclose(getattr(found.profile.table("x"), name), getattr(profile.table("x"), name), rtol=1e-6)
    assert found.cluster.within.bandwidth == pytest.approx(cluster.within.bandwidth, rel=1e-6)
    assert found.cluster.within.latency == pytest.approx(cluster.within.latency, rel=1e-6)
    assert found.profile.table("x").step_overhead == pytest.approx(0.0, abs=1e-9)
    assert len(found.changes) == 4


def test_what_steps_take_beside_their_actions_is_added_to_every_prediction() -> None:
    slow = []
    for plan in both_sizes():
        timeline = plan_timeline(predict_again(plan, *true()))
        record = made_run(plan, timeline, outside=3.0)
        slow.append(ShortRun(plan=plan, records=(record,) * 2, seconds=record.steps[1].seconds))
    found = calibrate(*filed(), slow)
    assert found.profile.table("x").step_overhead == pytest.approx(3.0, rel=1e-6)
    truth = planned(*true(), global_batch=16, schedule="gpipe").prediction.time
    corrected = planned(found.profile, found.cluster, global_batch=16, schedule="gpipe").prediction.time
    assert corrected == pytest.approx(truth + 3.0, rel=1e-3)


def test_what_ranks_wait_for_each_other_counts_where_messages_follow_one_another() -> None:
    """Steps are longer than their layers, links and what is beside them say: by eight micro-batches' waits."""
    late = [replace(run, seconds=run.seconds + 8.0) for run in map(ran, both_sizes())]
    found, (profile, cluster) = calibrate(*filed(), late), true()
    assert found.profile.table("x").step_overhead == pytest.approx(0.0, abs=1e-6)
    assert found.cluster.within.latency > cluster.within.latency + 0.1
    for plan, run in zip(both_sizes(), late, strict=True):
        again = predict_again(plan, found.profile, found.cluster)
        assert plan_timeline(again).time == pytest.approx(run.seconds, rel=0.02)
    truth = planned(profile, cluster, global_batch=4, microbatch=2, schedule="gpipe").prediction.time
    fewer = planned(found.profile, found.cluster, global_batch=4, microbatch=2, schedule="gpipe").prediction.time
    assert truth < fewer < truth + 4.0


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b-sno", "zb", "interleaved"])
def test_plans_that_did_not_run_are_predicted(schedule: str) -> None:
    found = calibrated()
    guess = planned(*filed(), global_batch=16, schedule=schedule).prediction.time
    plan = planned(*true(), global_batch=16, schedule=schedule)
    truth = plan.prediction.time
    assert plan_timeline(predict_again(plan, found.profile, found.cluster)).time == pytest.approx(truth, rel=1e-3)
    assert abs(guess / truth - 1) > 0.2


def test_runs_that_cut_at_other_layers_tell_the_layers_apart() -> None:
    """One layer is three times as long as filed. A single run spreads that over its stage; with cuts on both sides
    of the layer in other runs, the layer itself is found. A split backward and a whole one count alike."""
    profile, cluster = filed()
    table = profile.table("x")
    factor = np.array([1.0, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0, 1.0])
    slower = {name: tuple(map(tuple, np.array(getattr(table, name)) * factor)) for name in ("forward", "backward")}
    truth = replace(profile, accelerators={"x": replace(table, **slower)})
    runs = []
    for cut, schedule in ((4, "1f1b-sno"), (3, "1f1b-sno"), (4, "zb-h1")):
        other = planned(profile, cluster, global_batch=8, microbatch=1, schedule=schedule, stages=2)
        bounds = ((0, cut - 1), (cut, LAYERS - 1))
        stages = tuple(
            replace(
                stage,
                first_layer=low,
                last_layer=high,
                layers=tuple(layer.name for layer in profile.layers[low : high + 1]),
            )
            for stage, (low, high) in zip(other.stages, bounds, strict=True)
        )
        plan = predict_again(replace(other, stages=stages), profile)
        runs.append((plan, made_run(plan, plan_timeline(predict_again(plan, truth)))))
    alone = np.array(fit_profile(profile, runs[:1]).table("x").forward) / np.array(table.forward)
    assert np.ptp(alone[0][:4]) == pytest.approx(0.0, abs=1e-9)
    together = np.array(fit_profile(profile, runs).table("x").forward) / np.array(table.forward)
    assert together[0] == pytest.approx(factor, rel=0.05)


def test_sums_of_gradients_have_the_rate_that_data_parallelism_showed() -> None:
    """Layers as filed, but sums five times slower: the rate is found from the step's time alone."""
    profile, cluster = filed()
    plan = planned(profile, cluster, global_batch=8, microbatch=4, schedule="data-parallel", engines=False)
    slow = planned(
        profile,
        replace(cluster, collective_bandwidth=10.0),
        global_batch=8,
        microbatch=4,
        schedule="data-parallel",
        engines=False,
    )
    run = ShortRun(plan=plan, records=(), seconds=slow.prediction.time)
    found = calibrate(profile, cluster, [run])
    assert found.profile == profile
    assert found.cluster.collective_bandwidth == pytest.approx(10.0, rel=1e-3)


@pytest.mark.parametrize("zero", ["0", "1"])
def test_collectives_with_rates_of_their_own_change_as_the_sums_that_a_run_showed(zero: str) -> None:
    """Five times slower, all of them, whether the run summed gradients or scattered them."""
    profile, cluster = filed()
    options = {
        "global_batch": 8,
        "microbatch": 4,
        "schedule": "data-parallel",
        "engines": False,
        "zero_stage": zero,
    }
    measured = CollectiveRates(buckets=60.0, gather=80.0, scatter=40.0)
    cluster = replace(cluster, collective_bandwidth=50.0, collective_rates=measured)
    plan = planned(profile, cluster, **options)
    slow = planned(profile, replace(cluster, collective_rates=measured.slower(5.0)), **options)
    run = ShortRun(plan=plan, records=(), seconds=slow.prediction.time)
    found = calibrate(profile, cluster, [run]).cluster
    assert found.collective_bandwidth == pytest.approx(12.0, rel=1e-3)
    assert found.collective_rates.buckets is None
    assert found.collective_rates.gather == pytest.approx(16.0, rel=1e-3)
    assert found.collective_rates.scatter == pytest.approx(8.0, rel=1e-3)


def mixed() -> tuple[Profile, Cluster]:
    """Two types, of which y is twice as fast, and sums that take long."""
    work = [1.0 + place / 8 for place in range(LAYERS)]
    profile = made_profile({"x": work, "y": [own / 2 for own in work]}, weights=[40.0] * LAYERS)
    return profile, replace(made_cluster({"x": 1, "y": 1}), collective_bandwidth=50.0)


def test_sums_have_the_rate_that_dealt_data_parallelism_showed() -> None:
    """Two of three micro-batches are y's: beside data parallelism in equal parts its step would show no sums."""
    profile, cluster = mixed()
    options = {"global_batch": 12, "microbatch": 4, "schedule": "data-parallel", "engines": False}
    plan = planned(profile, cluster, **options)
    assert [own.microbatches for own in plan.stages[0].replicas or ()] == [1, 2]
    slow = planned(profile, replace(cluster, collective_bandwidth=10.0), **options)
    run = ShortRun(plan=plan, records=(), seconds=slow.prediction.time)
    assert calibrate(profile, cluster, [run]).cluster.collective_bandwidth == pytest.approx(10.0, rel=1e-3)


def test_dealt_plans_are_predicted_by_other_costs_of_each_replica() -> None:
    """What the plan says of its replicas, its sums and its optimizer steps follows the profile and the cluster."""
    profile, cluster = mixed()
    options = {"global_batch": 12, "microbatch": 4, "schedule": "data-parallel", "engines": False}
    plan = planned(profile, cluster, **options)
    table = profile.table("y")
    slower = {name: tuple(map(tuple, 1.5 * np.array(getattr(table, name)))) for name in ("forward", "backward")}
    other = replace(
        profile, accelerators={**profile.accelerators, "y": replace(table, **slower, update=(0.25,) * LAYERS)}
    )
    links = replace(cluster, collective_bandwidth=20.0)
    again = predict_again(plan, other, links)
    before, after = plan.stages[0], again.stages[0]
    assert before.replicas is not None
    assert after.replicas is not None
    assert after.replicas[0] == before.replicas[0]
    assert after.replicas[1].forward == pytest.approx(1.5 * before.replicas[1].forward)
    assert after.replicas[1].update == pytest.approx(0.25 * LAYERS)
    planned_so = planned(other, links, **options)
    assert planned_so.schedule == plan.schedule
    assert after.all_reduce == pytest.approx(planned_so.stages[0].all_reduce)
    assert plan_timeline(again).time == pytest.approx(planned_so.prediction.time, rel=1e-9)


def test_data_parallelism_on_some_accelerators_does_not_tell_the_rate_of_all() -> None:
    profile, cluster = filed()
    plan = planned(profile, cluster, global_batch=8, microbatch=4, schedule="data-parallel")
    more = replace(
        cluster,
        accelerators=(*cluster.accelerators, replace(cluster.accelerators[0], name="another/0", node="another")),
    )
    run = ShortRun(plan=plan, records=(), seconds=2 * plan.prediction.time)
    assert calibrate(profile, more, [run]).cluster == more
