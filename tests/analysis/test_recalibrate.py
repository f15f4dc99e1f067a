"""A corrected profile predicts what was measured: costs are altered, simulated, recorded and corrected."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from bapipe.analysis.predicted_measured import compare
from bapipe.analysis.recalibrate import predict_again, recalibrate
from bapipe.costs.fields import COST_FIELDS
from bapipe.costs.profile import Profile, read_profile, write_profile
from bapipe.costs.segments import make_chain
from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import Accelerator, Cluster, Link
from bapipe.io.files import content_hash
from bapipe.planner import Request, explore, make_plan
from bapipe.planner.candidate import Candidate, Hardware, StageChoice
from bapipe.planner.evaluate import Evaluation, evaluate
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.records.plan import LayerPart, Plan
from bapipe.schedule.actions import Kind, Schedule
from bapipe.schedule.generators import capped, interleaved, make_schedule
from bapipe.simulator.action_costs import Costs
from made_profiles import made_cluster, made_profile
from made_runs import made_run, simulated

LAYERS = 8


def _profile(*types: str, weight_gradient: bool = False) -> Profile:
    """Layers of 1 to 8 s on the first type, 2 to 16 s on the second, with updates of a tenth."""
    profile = made_profile(
        {kind: [(number + 1.0) * (place + 1) for place in range(LAYERS)] for number, kind in enumerate(types)},
        boundary=[100.0] * LAYERS,
        weights=[40.0] * LAYERS,
    )
    tables = {
        name: replace(
            table,
            update=tuple(0.1 * (place + 1) for place in range(LAYERS)),
            weight_gradient=tuple(tuple(0.3 * value for value in row) for row in table.backward)
            if weight_gradient
            else None,
        )
        for name, table in profile.accelerators.items()
    }
    return replace(profile, accelerators=tables)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A partition, its order and its accelerators."""

    cuts: tuple[int, ...]
    """the first layer of each stage but the first"""
    schedule: Schedule
    ranks: tuple[tuple[int, ...], ...] | None = None
    """accelerators of each stage; None: one each"""
    types: tuple[tuple[str, int], ...] = (("x", 4),)
    recompute: bool = False
    weight_gradient: bool = False
    microbatch: int = 2

    def profile(self) -> Profile:
        return _profile(*(name for name, _ in self.types), weight_gradient=self.weight_gradient)

    def cluster(self) -> Cluster:
        return made_cluster(dict(self.types), bandwidth=50.0)

    def evaluated(self, profile: Profile) -> Evaluation:
        """This partition as the planner times it."""
        cluster = self.cluster()
        chain = make_chain(profile, [name for name, _ in self.types], self.microbatch)
        edges = (0, *self.cuts, LAYERS)
        ranks = self.ranks or tuple((stage,) for stage in range(len(edges) - 1))
        stages = tuple(
            StageChoice(first=first, last=last - 1, accelerators=members, recompute=self.recompute)
            for first, last, members in zip(edges[:-1], edges[1:], ranks, strict=True)
        )
        candidate = Candidate(label="case", chain=chain, stages=stages, schedule=self.schedule)
        return evaluate(candidate, Hardware(cluster=cluster, overlap_all_reduce=False))

    def plan(self) -> Plan:
        profile = self.profile()
        best = self.evaluated(profile)
        global_batch = self.microbatch * self.schedule.num_microbatches
        found = explore(profile, self.cluster(), Request(global_batch=global_batch, microbatch=self.microbatch))
        return make_plan(replace(found, best=best))


CASES = {
    "1f1b-so": Case(cuts=(3, 6), schedule=make_schedule("1f1b-so", 3, 6), types=(("x", 3),)),
    "own weight gradients": Case(
        cuts=(3, 6), schedule=make_schedule("1f1b-sno", 3, 6), types=(("x", 3),), weight_gradient=True
    ),
    "recomputation": Case(cuts=(4,), schedule=make_schedule("gpipe", 2, 4), types=(("x", 2),), recompute=True),
    "zero-bubble": Case(cuts=(4,), schedule=make_schedule("zb-h1", 2, 6), types=(("x", 2),)),
    "zero-bubble, own weight gradients": Case(
        cuts=(4,), schedule=make_schedule("zb-h1", 2, 6), types=(("x", 2),), weight_gradient=True
    ),
    "several stages on a rank": Case(
        cuts=(2, 4, 6), schedule=interleaved(2, 4), types=(("x", 2),), ranks=((0,), (1,), (0,), (1,))
    ),
    "replicas": Case(
        cuts=(5,), schedule=capped(2, 6, [4, 1], replicas=[2, 1]), types=(("x", 3),), ranks=((0, 1), (2,))
    ),
    "data parallelism": Case(
        cuts=(), schedule=capped(1, 4, [2], replicas=[2]), types=(("x", 2),), ranks=((0, 1),)
    ),
    "two types": Case(cuts=(5,), schedule=make_schedule("1f1b-so", 2, 6), types=(("fast", 1), ("slow", 1))),
    "between profiled sizes": Case(
        cuts=(3,), schedule=make_schedule("1f1b-so", 2, 6), types=(("x", 2),), microbatch=3
    ),
}


@functools.cache
def planned(name: str) -> Plan:
    return CASES[name].plan()


def _altered(plan: Plan, factors: random.Random, *, split: bool) -> Costs:
    """The plan's costs, each stage's by factors of its own."""

    def draw(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(value * factors.uniform(0.5, 3.0) for value in values)

    stages = plan.stages
    inputs = draw([stage.backward - stage.weight_gradient for stage in stages])
    weights = draw([stage.weight_gradient for stage in stages])
    backward = draw([stage.backward for stage in stages])
    if split:
        backward = tuple(i + w for i, w in zip(inputs, weights, strict=True))
    forward = draw([stage.forward for stage in stages])
    return Costs(
        forward=forward,
        backward=backward,
        send_forward=tuple(stage.send_forward_bytes for stage in stages[:-1]),
        send_backward=tuple(stage.send_backward_bytes for stage in stages[1:]),
        input_gradient=inputs,
        weight_gradient=weights,
        recompute=forward,
        all_reduce=tuple(stage.all_reduce for stage in stages),
        update=draw([stage.update for stage in stages]),
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", CASES)
def test_planning_again_predicts_what_was_measured(name: str, seed: int) -> None:
    case = CASES[name]
    plan = planned(name)
    split = any(action.kind == Kind.W for lane in case.schedule.lanes for action in lane)
    costs = _altered(plan, random.Random(seed), split=split)
    measured = simulated(plan, costs)
    assert measured.time != pytest.approx(plan.prediction.time, rel=1e-3)

    found = recalibrate(plan, made_run(plan, measured), case.profile())
    again = case.evaluated(found.profile)
    assert again.time == pytest.approx(measured.time, rel=1e-9)
    assert again.costs.forward == pytest.approx(costs.forward, rel=1e-9)
    assert again.costs.backward == pytest.approx(costs.backward, rel=1e-9)
    if split:
        assert again.costs.weight_gradient == pytest.approx(costs.weight_gradient, rel=1e-9)
    assert plan_timeline(predict_again(plan, found.profile)).time == pytest.approx(measured.time, rel=1e-9)
    assert again.timeline.busy() == pytest.approx(measured.busy(), rel=1e-9)
    assert not any("stay" in note for note in found.notes)


def test_a_run_as_predicted_changes_no_figure() -> None:
    case = CASES["1f1b-so"]
    plan, profile = case.plan(), case.profile()
    found = recalibrate(plan, made_run(plan, plan_timeline(plan)), profile)
    before, after = profile.table("x"), found.profile.table("x")
    for row in found.corrections:
        assert (row.forward, row.backward, row.update) == pytest.approx((1.0, 1.0, 1.0))
    for field in ("forward", "backward"):
        for one, other in zip(getattr(before, field), getattr(after, field), strict=True):
            assert other == pytest.approx(one)
    assert (after.saved_activations, after.boundary_forward, after.microbatches) == (
        before.saved_activations,
        before.boundary_forward,
        before.microbatches,
    )


def test_every_size_is_scaled_by_the_stages_ratio_and_the_profile_says_by_what(tmp_path) -> None:
    case = CASES["1f1b-so"]
    plan, profile = case.plan(), case.profile()
    stages = plan.stages
    costs = Costs.of(
        3,
        forward=[stage.forward * factor for stage, factor in zip(stages, (2.0, 3.0, 0.5), strict=True)],
        backward=[stage.backward * 1.5 for stage in stages],
        update=[stage.update * 4.0 for stage in stages],
    )
    record = made_run(plan, simulated(plan, costs))
    found = recalibrate(plan, record, profile)
    before, after = profile.table("x"), found.profile.table("x")
    factors = [2.0] * 3 + [3.0] * 3 + [0.5] * 2
    for one, other in zip(before.forward, after.forward, strict=True):
        assert other == pytest.approx([value * factor for value, factor in zip(one, factors, strict=True)])
    assert after.update == pytest.approx([value * 4.0 for value in before.update])
    assert after.source == "hand-written"
    assert after.description == (
        f"made for a test | recalibrated by run {content_hash(record)} of plan {content_hash(plan)} at "
        "micro-batch 2: forward ×0.500 to ×3.000, backward ×1.500, optimizer step ×4.000"
    )
    write_profile(found.profile, tmp_path / "corrected.json")
    assert read_profile(tmp_path / "corrected.json") == found.profile


def test_every_time_is_corrected_by_its_ratio_and_bytes_stay() -> None:
    case = CASES["1f1b-so"]
    profile = case.profile()
    before = profile.table("x")
    unknown = [
        name for name, rule in COST_FIELDS.items() if rule.per == "size and layer" and rule.unknown is not None
    ]
    before = replace(before, **dict.fromkeys(unknown, before.forward))
    profile = replace(profile, accelerators={"x": before})
    plan = replace(case.plan(), profile_hash=profile.hash)
    costs = Costs.of(
        3,
        forward=[stage.forward * 2.0 for stage in plan.stages],
        backward=[stage.backward * 3.0 for stage in plan.stages],
        update=[stage.update * 4.0 for stage in plan.stages],
    )
    after = recalibrate(plan, made_run(plan, simulated(plan, costs)), profile).profile.table("x")
    factors = {"forward": 2.0, "backward": 3.0, "weight_gradient": 3.0, "update": 4.0}
    for name, rule in COST_FIELDS.items():
        if rule.ratio is None:
            assert getattr(after, name) == getattr(before, name)
        else:
            expected = np.array(getattr(before, name)) * factors[rule.ratio]
            assert np.array(getattr(after, name)) == pytest.approx(expected), name


def test_layers_that_a_type_has_not_run_get_its_overall_ratio() -> None:
    """The fast one ran layers 0 to 4, twice as slow as predicted; the slow one the rest, as predicted."""
    case = CASES["two types"]
    plan, profile = case.plan(), case.profile()
    costs = Costs.of(
        2,
        forward=[plan.stages[0].forward * 2, plan.stages[1].forward],
        backward=[plan.stages[0].backward * 3, plan.stages[1].backward],
    )
    found = recalibrate(plan, made_run(plan, simulated(plan, costs)), profile)
    for kind, forward, backward in (("fast", 2.0, 3.0), ("slow", 1.0, 1.0)):
        before, after = profile.table(kind), found.profile.table(kind)
        assert after.forward[0] == pytest.approx([value * forward for value in before.forward[0]])
        assert after.backward[0] == pytest.approx([value * backward for value in before.backward[0]])
        assert "layers that it has not run" in after.description


def test_a_type_that_has_not_run_stays_and_is_named() -> None:
    case = CASES["1f1b-so"]
    profile = _profile("x", "other")
    plan = replace(case.plan(), profile_hash=profile.hash)
    record = made_run(plan, plan_timeline(plan))
    found = recalibrate(plan, record, profile)
    assert found.profile.table("other") == profile.table("other")
    assert found.notes == ("not corrected, because the run has none of that type: other",)


def test_a_recomputed_forward_and_its_first_run_share_one_figure() -> None:
    """F takes 3 times, R once what was predicted: the profile has one figure, so both take twice."""
    case = CASES["recomputation"]
    plan, profile = case.plan(), case.profile()
    forward = [stage.forward for stage in plan.stages]
    costs = Costs.of(
        2,
        forward=[3 * value for value in forward],
        recompute=forward,
        backward=[stage.backward for stage in plan.stages],
    )
    found = recalibrate(plan, made_run(plan, simulated(plan, costs)), profile)
    assert [row.forward for row in found.corrections] == pytest.approx([2.0, 2.0])


def test_a_shorter_last_microbatch_does_not_count() -> None:
    case = CASES["1f1b-so"]
    plan = replace(case.plan(), global_batch=11)
    timeline = plan_timeline(plan)
    last = timeline.microbatches == 5
    shorter = replace(timeline, end=timeline.end - (last & (timeline.kinds == Kind.F)) * timeline.work / 2)
    record = made_run(plan, shorter)
    assert [row.forward.error for row in compare(plan, record).stages] == pytest.approx([0.0] * 3)
    found = recalibrate(plan, record, case.profile())
    assert [row.forward for row in found.corrections] == pytest.approx([1.0] * 3)


def test_a_layer_in_two_stages_gets_the_mean_of_their_ratios() -> None:
    """Half of layer 3 is in each stage: F of the first takes 3 times, of the second once what was predicted."""
    case = Case(cuts=(4,), schedule=make_schedule("1f1b-so", 2, 4), types=(("x", 2),))
    plan, profile = case.plan(), case.profile()
    part = LayerPart(layer=3, start=0, stop=1, of=2)
    first, second = (
        replace(plan.stages[0], fractions=(part,)),
        replace(plan.stages[1], first_layer=3, fractions=(replace(part, start=1, stop=2),)),
    )
    # Of the profile's forwards, 2/3 · (1 … 8) at micro-batch 2.
    first = replace(first, forward=2 / 3 * (6 + 2), backward=4 / 3 * (6 + 2))
    second = replace(second, forward=2 / 3 * (2 + 26), backward=4 / 3 * (2 + 26))
    plan = replace(plan, stages=(first, second))
    costs = Costs.of(2, forward=[3 * first.forward, second.forward], backward=[first.backward, second.backward])
    found = recalibrate(plan, made_run(plan, simulated(plan, costs)), profile)
    ratios = [
        new / old
        for new, old in zip(found.profile.table("x").forward[1], profile.table("x").forward[1], strict=True)
    ]
    assert ratios == pytest.approx([3.0, 3.0, 3.0, 2.0, 1.0, 1.0, 1.0, 1.0])


def test_what_cannot_be_corrected_is_said() -> None:
    case = CASES["1f1b-so"]
    plan = case.plan()
    record = made_run(plan, plan_timeline(plan))
    without = replace(record, events=tuple(event for event in record.events if not event.action.endswith("U")))
    found = recalibrate(plan, without, case.profile())
    assert found.notes == ("optimizer steps are not corrected: the run or the profile has no times of them",)
    assert found.profile.table("x").update == case.profile().table("x").update

    nothing = made_run(plan, replace(plan_timeline(plan), end=plan_timeline(plan).start))
    notes = recalibrate(plan, nothing, case.profile()).notes
    assert "forward of stage 0 is measured at 0 s on x; its times stay" in notes


def test_another_profile_is_refused() -> None:
    case = CASES["1f1b-so"]
    plan = case.plan()
    with pytest.raises(BaPipeError, match=r"made from profile .*; give the profile that was planned with"):
        recalibrate(plan, made_run(plan, plan_timeline(plan)), replace(case.profile(), dtype="bf16"))


def test_accelerators_of_one_type_in_two_nodes_are_corrected_together() -> None:
    case = CASES["1f1b-so"]
    plan = case.plan()
    accelerators = tuple(
        Accelerator(name=f"{node}/{index}", type="x", node=node) for node, index in (("a", 0), ("a", 1), ("b", 0))
    )
    cluster = replace(plan.cluster, accelerators=accelerators, between=Link(bandwidth=20.0))
    stages = tuple(
        replace(stage, accelerators=(accelerator.name,))
        for stage, accelerator in zip(plan.stages, accelerators, strict=True)
    )
    plan = replace(plan, cluster=cluster, stages=stages)
    costs = _altered(plan, random.Random(0), split=False)
    measured = simulated(plan, costs)
    found = recalibrate(plan, made_run(plan, measured), case.profile())
    again = plan_timeline(predict_again(plan, found.profile))
    assert again.time == pytest.approx(measured.time, rel=1e-9)
