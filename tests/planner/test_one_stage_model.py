"""Time, memory and micro-batches in flight are each said once: change one, and all that build on it follow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bapipe.analysis.recalibrate import predict_again
from bapipe.costs.profile import Profile
from bapipe.costs.segments import Chain, make_chain
from bapipe.costs.stage_memory import StageBytes, UnitBytes, every_run_bytes, stage_bytes
from bapipe.costs.stage_time import UnitSeconds, every_run
from bapipe.fpga.schedule_rules import Rule
from bapipe.hardware.cluster import Cluster
from bapipe.planner import Request, explore, make_plan
from bapipe.planner.candidate import Hardware
from bapipe.planner.data_parallel import analytic_alternatives
from bapipe.planner.inflight_caps import least_caps
from bapipe.planner.partition.paper.stage_cuts import prefix_work
from bapipe.planner.pipelines import FAMILIES, unreplicated_stages
from bapipe.records.plan import MemoryParts, Plan
from bapipe.reporting.html.document import Subject, make_subject
from bapipe.schedule import inflight
from bapipe.schedule.generators import make_schedule
from made_profiles import made_cluster, made_profile

MORE = 1e6
SO = Request(global_batch=8, microbatch=1, stages=2, schedule="1f1b-so")


def alike() -> Profile:
    """Four layers of 3 s and 300 kB of activations a sample."""
    return made_profile({"x": [3.0] * 4}, saved_activations=[3e5] * 4, weights=[1e5] * 4)


def planned(request: Request = SO, **cluster: float) -> tuple[Plan, Subject]:
    plan = make_plan(explore(alike(), two(**cluster), request))
    return plan, make_subject(plan)


def two(**more: float) -> Cluster:
    return made_cluster({"x": 2}, bandwidth=1e9, **more)  # type: ignore[arg-type]


def parts_of(subject: Subject) -> list[MemoryParts]:
    return [rank.parts for rank in subject.memory.ranks]


def test_the_search_the_plan_the_report_and_recalibration_follow_the_time_of_a_stage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, _ = planned()
    assert [(stage.first_layer, stage.last_layer) for stage in before.stages] == [(0, 1), (2, 3)]
    alternatives = analytic_alternatives(make_chain(alike(), ["x"], 1), Hardware(cluster=two()), 8)
    assert _caps_that_hide_transfers() == [5, 1]
    true = UnitSeconds.of

    def longer(chain: Chain) -> UnitSeconds:
        """The first layer's forward takes 7 s and not 1."""
        found = true(chain)
        more = found.forward.copy()
        more[:, 0] += 6.0
        return replace(found, forward=more)

    monkeypatch.setattr(UnitSeconds, "of", longer)
    after, subject = planned()
    assert [(stage.first_layer, stage.last_layer) for stage in after.stages] == [(0, 0), (1, 3)]
    assert [stage.forward for stage in after.stages] == pytest.approx([7.0, 3.0])
    assert subject.predicted.busy() == pytest.approx([8 * (7 + 2), 8 * 9])
    again = predict_again(before, alike())
    assert [stage.forward for stage in again.stages] == pytest.approx([8.0, 2.0])
    chain, hardware = make_chain(alike(), ["x"], 1), Hardware(cluster=two())
    assert every_run(chain, 0).work[0, 1] == pytest.approx(12.0)
    assert prefix_work(chain)[0][1] == pytest.approx(9.0)
    for one, other in zip(alternatives, analytic_alternatives(chain, hardware, 8), strict=True):
        assert other.time > one.time
    assert _caps_that_hide_transfers() == [3, 1], "there is more time to hide them in"


def test_activations_of_next_to_no_bytes_bound_nothing() -> None:
    """More micro-batches would fit than a number can say."""
    profile = made_profile({"x": [3.0] * 4}, boundary=[9e9] * 4, saved_activations=[1e-300] * 4)
    chain = make_chain(profile, ["x"], 1)
    assert least_caps(chain, unreplicated_stages([1, 3], [0, 1]), 8, Hardware(cluster=two())) == (
        _caps_that_hide_transfers()
    )


def _caps_that_hide_transfers() -> list[int]:
    """Of two alike stages, 9 s of transfer each way between them."""
    chain = make_chain(made_profile({"x": [3.0] * 4}, boundary=[9e9] * 4), ["x"], 1)
    return least_caps(chain, unreplicated_stages([1, 3], [0, 1]), 8, Hardware(cluster=two()))


def test_the_search_the_plan_and_the_report_follow_the_memory_of_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    before, shown = planned()
    chain = make_chain(alike(), ["x"], 1)
    weighed = stage_bytes(chain, 0, 1)
    alternatives = analytic_alternatives(chain, Hardware(cluster=two()), 8)
    true = UnitBytes.of

    def heavier(chain: Chain) -> UnitBytes:
        """The first layer keeps a megabyte more."""
        found = true(chain)
        more = found.saved_activations.copy()
        more[0] += MORE
        return replace(found, saved_activations=more)

    monkeypatch.setattr(UnitBytes, "of", heavier)
    after, subject = planned()
    live = before.stages[0].in_flight
    assert after.stages[0].memory_bytes == pytest.approx(before.stages[0].memory_bytes + live * MORE)
    assert after.stages[1].memory_bytes == before.stages[1].memory_bytes
    assert parts_of(subject)[0].activations == pytest.approx(parts_of(shown)[0].activations + live * MORE)
    assert subject.memory.ranks[0].peak_activations == pytest.approx(parts_of(subject)[0].activations)
    chain = make_chain(alike(), ["x"], 1)
    assert isinstance(stage_bytes(chain, 0, 1), StageBytes)
    assert stage_bytes(chain, 0, 1).saved_activations == weighed.saved_activations + MORE
    assert every_run_bytes(chain).saved_activations[0, 1] == weighed.saved_activations + MORE
    for one, other in zip(alternatives, analytic_alternatives(chain, Hardware(cluster=two()), 8), strict=True):
        assert other.memory == pytest.approx(one.memory + MORE)
    # The balanced cut does not fit any more: the first stage gives a layer away.
    tight, _ = planned(replace(SO, recompute="never"), memory=after.stages[0].memory_bytes - 1e5)
    assert [(stage.first_layer, stage.last_layer) for stage in tight.stages] == [(0, 0), (1, 3)]


def test_schedules_the_search_the_plan_and_the_report_follow_the_microbatches_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, shown = planned()
    assert [stage.in_flight for stage in before.stages] == [4, 2]
    true = inflight.most_inflight
    monkeypatch.setattr(inflight, "most_inflight", lambda *asked: true(*asked) + 1)
    after, subject = planned()
    assert [stage.in_flight for stage in after.stages] == [5, 3]
    assert after.schedule.caps == (5, 3)
    for stage, one, other in zip(before.stages, parts_of(shown), parts_of(subject), strict=True):
        assert stage.saved_bytes is not None
        assert other.activations == pytest.approx(one.activations + stage.saved_bytes)
    assert make_schedule("1f1b-sno", 2, 8).caps == (3, 2)
    assert make_schedule("1f1b-so", 2, 8, replicas=[2, 1]).caps == (8, 3)
    assert make_schedule("zb-h1", 2, 8).caps == (3, 3)
    assert FAMILIES["gpipe"].inflight(2, 2, 8) == 8, "never more than there are"
    assert FAMILIES["zb-h2"].inflight(2, 2, 8) == 4
    assert Rule(schedule="fbp-as", microbatch=2, global_batch=32, forward_share=0.5).images(1) == 2 * 3
    chain, hardware = make_chain(alike(), ["x"], 1), Hardware(cluster=two())
    assert least_caps(chain, unreplicated_stages([1, 3], [0, 1]), 8, hardware) == [3, 2]
