"""What a divided layer costs beyond its parts' shares: in the profile, the chain, a stage, a plan."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bapipe.analysis.recalibrate import predict_again, recalibrate
from bapipe.costs.profile import CostTable, Profile, read_profile, write_profile
from bapipe.costs.profile_merge import merge_profiles
from bapipe.costs.segments import make_chain
from bapipe.costs.stage_memory import UnitBytes, stage_bytes
from bapipe.costs.stage_time import UnitSeconds, stage_seconds
from bapipe.errors import BaPipeError
from bapipe.hardware.cluster import Cluster
from bapipe.io.files import content_hash, plain_values
from bapipe.models.layers import Split
from bapipe.planner import Request, explore, make_plan
from bapipe.planner.candidate import Candidate, Hardware, StageChoice
from bapipe.planner.evaluate import evaluate
from bapipe.planner.intra_layer_cuts import refined
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.records.plan import Plan
from bapipe.schedule.generators import SCHEDULES
from bapipe.simulator.action_costs import Costs
from made_profiles import made_cluster, made_profile
from made_runs import made_run, simulated

FORWARD, BACKWARD, SAVED = 0.25, 0.5, 3.0
"""that each part of the middle layer takes and keeps on top"""


def divided_profile(work: float = 2.0, *, by: str = "time steps", sizes: tuple[int, ...] = (1,)) -> Profile:
    """Three layers of 1 s, `work` and 1 s for a sample, of which the middle one may be divided in 4."""
    made = made_profile(
        {"x": [1.0, work, 1.0]},
        boundary=[10.0, 40.0, 0.0],
        weights=[8.0, 40.0, 8.0],
        saved_activations=[4.0, 8.0, 4.0],
        sizes=sizes,
        split={1: 4},
    )
    middle = replace(made.layers[1], split=Split(channels=4, by=by))
    table = replace(
        made.table("x"),
        update=(0.1, 0.4, 0.1),
        part_forward=tuple((0.0, size * FORWARD, 0.0) for size in sizes),
        part_backward=tuple((0.0, size * BACKWARD, 0.0) for size in sizes),
        part_saved_activations=tuple((0.0, size * SAVED, 0.0) for size in sizes),
    )
    return replace(made, layers=(made.layers[0], middle, made.layers[2]), accelerators={"x": table})


def cluster(count: int = 2, **more: object) -> Cluster:
    return made_cluster({"x": count}, bandwidth=20.0, **more)  # type: ignore[arg-type]


def evaluated(profile: Profile, *lasts: int):
    """Straight stages that end after these units of the chain with the middle layer in quarters: 0, 1 … 4, 5."""
    chain = make_chain(profile, ["x"], 1, split={1: 4})
    firsts = [0, *(last + 1 for last in lasts[:-1])]
    stages = tuple(
        StageChoice(first=first, last=last, accelerators=(index,))
        for index, (first, last) in enumerate(zip(firsts, lasts, strict=True))
    )
    schedule = SCHEDULES["1f1b-so"](len(lasts), 4)
    candidate = Candidate(label="made", chain=chain, stages=stages, schedule=schedule)
    return evaluate(candidate, Hardware(cluster=cluster(len(lasts))))


def test_both_stages_pay_for_the_layer_that_they_divide() -> None:
    # A quarter of the middle layer is 0.5 s, a third of it forward, and 10 bytes of weights.
    costs = evaluated(divided_profile(), 1, 5).costs
    assert costs.forward == pytest.approx((1.5 / 3 + FORWARD, 2.5 / 3 + FORWARD))
    assert costs.backward == pytest.approx((3 / 3 + BACKWARD, 5 / 3 + BACKWARD))
    # A first stage sends no error on, so all of its backward can be put off; of the second the weight gradient of
    # its last layer, half of that layer's backward, and nothing of the layer that goes on from the first's state.
    assert costs.weight_gradient == pytest.approx((3 / 3 + BACKWARD, 1 / 3))
    # Both update all of the layer's 40 bytes, after summing its gradients at 20 bytes a second.
    assert costs.update == pytest.approx((0.1 + 0.4 + 2.0, 0.1 + 0.4 + 2.0))


def test_parts_by_time_steps_hold_all_weights_and_other_parts_their_share() -> None:
    for by, weights, update in (
        ("time steps", (48.0, 48.0), (2.5, 2.5)),
        ("vocabulary", (18.0, 38.0), (0.2, 0.4)),
    ):
        found = evaluated(divided_profile(by=by), 1, 5)
        chain = found.candidate.chain
        needed = [stage_bytes(chain, 0, 1), stage_bytes(chain, 2, 5)]
        assert tuple(item.weights for item in needed) == weights
        assert found.costs.update == pytest.approx(update)
        # Shares, what is sent (input and the quarter that is done), the second's input, and a part's own.
        assert [item.saved_activations for item in needed] == [4 + 2 + (10 + 10) + SAVED, 6 + 4 + 10 + SAVED]
        assert found.memory[1] >= 2 * weights[1] + needed[1].saved_activations, (
            "weights, gradients and a live micro-batch"
        )


def test_a_stage_inside_one_layer_pays_at_both_ends() -> None:
    chain = make_chain(divided_profile(), ["x"], 1, split={1: 4})
    share, units = UnitSeconds.of(chain), UnitBytes.of(chain)
    for first, last, ends in ((2, 3, 2), (0, 0, 0), (1, 4, 0), (0, 5, 0), (5, 5, 0)):
        own, span = stage_seconds(chain, [(first, last)]), slice(first, last + 1)
        assert own.forward[0] == pytest.approx(float(share.forward[0, span].sum()) + ends * FORWARD)
        assert own.backward[0] == pytest.approx(float(share.backward[0, span].sum()) + ends * BACKWARD)
        # The other half of the layer's weights and of their update.
        assert own.update[0] == pytest.approx(float(share.update[0, span].sum()) + ends * 0.1)
        needed = stage_bytes(chain, first, last)
        assert needed.weights == float(units.weights[span].sum()) + ends * 10.0
        messages = float(chain.resident_input[first] + chain.boundary_forward[last]) - (10.0 if ends else 0.0)
        assert needed.saved_activations == float(units.saved_activations[span].sum()) + messages + ends * SAVED
    assert stage_bytes(chain, 2, 3).weights == 40.0
    # Three stages hold the layer, so three ranks sum its gradients: 2 · 2/3 of 40 bytes.
    assert evaluated(divided_profile(), 1, 3, 5).costs.update[1] == pytest.approx(0.4 + 4 / 3 * 40 / 20)


def test_tied_weights_are_counted_where_they_stand_first() -> None:
    profile = divided_profile()
    tied = replace(profile.layers[1], shares_weights_with="layer0")
    profile = replace(profile, layers=(profile.layers[0], tied, profile.layers[2]))
    chain = make_chain(profile, ["x"], 1, split={1: 4})
    assert stage_bytes(chain, 0, 5).weights == 8.0 + 8.0
    # Without that layer the stage holds a copy: three quarters of 40 bytes.
    assert stage_bytes(chain, 2, 5).weights == 30.0 + 8.0


def planned(profile: Profile) -> Plan:
    request = Request(global_batch=8, microbatch=1, stages=2, schedule="1f1b-so", split_layers=True)
    return make_plan(explore(profile, cluster(), request))


def test_the_plans_figures_are_those_that_were_simulated() -> None:
    plan = planned(divided_profile(12.0))
    (cut,) = (part for part in plan.stages[0].fractions)
    assert (cut.layer, cut.start, cut.of) == (1, 0, 4)
    share = cut.stop / cut.of
    assert plan.stages[0].forward == pytest.approx((1 + 12 * share) / 3 + FORWARD)
    assert plan.stages[1].backward == pytest.approx((1 + 12 * (1 - share)) * 2 / 3 + BACKWARD)
    assert [stage.weight_bytes for stage in plan.stages] == [48.0, 48.0]
    assert plan_timeline(plan).time == pytest.approx(plan.prediction.time)
    again = predict_again(plan, divided_profile(12.0))
    for before, after in zip(plan.stages, again.stages, strict=True):
        for field in ("forward", "backward", "weight_gradient", "update"):
            assert getattr(after, field) == pytest.approx(getattr(before, field))


def test_a_division_that_costs_more_than_it_balances_is_not_made() -> None:
    dear = divided_profile(12.0)
    table = dear.table("x")
    assert table.part_forward is not None
    dear = replace(dear, accelerators={"x": replace(table, part_forward=((0.0, 9.0, 0.0),))})
    assert planned(dear).stages[0].fractions == ()
    assert planned(divided_profile(12.0)).stages[0].fractions != ()


def test_a_correction_by_a_run_scales_what_parts_cost_too() -> None:
    profile = divided_profile(12.0)
    plan = planned(profile)
    costs = Costs.of(
        2,
        forward=[2 * stage.forward for stage in plan.stages],
        backward=[3 * stage.backward for stage in plan.stages],
    )
    found = recalibrate(plan, made_run(plan, simulated(plan, costs)), profile)
    table = found.profile.table("x")
    assert table.part_forward == ((0.0, pytest.approx(2 * FORWARD), 0.0),)
    assert table.part_backward == ((0.0, pytest.approx(3 * BACKWARD), 0.0),)
    again = predict_again(plan, found.profile)
    assert [stage.forward for stage in again.stages] == pytest.approx([2 * s.forward for s in plan.stages])


def test_a_plan_that_divides_says_where_parts_were_not_measured() -> None:
    known = divided_profile(12.0)
    table = replace(known.table("x"), part_forward=None, part_backward=None, part_saved_activations=None)
    unknown = replace(known, accelerators={"x": table})
    told = "parts of divided layers are taken to cost their share"
    (note,) = (item for item in planned(unknown).notes if item.startswith(told))
    assert note.endswith("though they may take longer: profile x with --parts")
    assert not any(item.startswith(told) for item in planned(known).notes)
    whole = Request(global_batch=8, microbatch=1, stages=2, schedule="1f1b-so")
    assert not any(item.startswith(told) for item in make_plan(explore(unknown, cluster(), whole)).notes)


def test_profiles_keep_check_and_interpolate_part_costs(tmp_path) -> None:
    profile = divided_profile(sizes=(1, 4))
    write_profile(profile, tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == profile
    assert profile.at("x", 2).part_backward.tolist() == [0.0, 2 * BACKWARD, 0.0]
    table = profile.table("x")
    with pytest.raises(
        BaPipeError, match=r"part_saved_activations is wrong: 2 values for 3 layers at micro-batch 1"
    ):
        replace(profile, accelerators={"x": replace(table, part_saved_activations=((0.0, 1.0), (0.0, 1.0)))})
    with pytest.raises(BaPipeError, match=r"part_forward is wrong: -1 for layer 'layer1'"):
        replace(profile, accelerators={"x": replace(table, part_forward=((0.0, -1.0, 0.0),) * 2)})


def test_profiles_without_part_costs_read_and_hash_as_before(tmp_path) -> None:
    old = made_profile({"x": [1.0, 2.0]}, split={1: 4})
    values = plain_values(old)
    for name in ("part_forward", "part_backward", "part_saved_activations", "delayed"):
        assert values["accelerators"]["x"].pop(name) is None
    assert content_hash(old) == "73c5f98a524369e5"
    (tmp_path / "old.json").write_text(json.dumps(values))
    assert read_profile(tmp_path / "old.json") == old
    assert old.at("x", 1).part_forward.tolist() == [0.0, 0.0]


def test_merged_sizes_have_part_costs_of_the_nearest_where_one_has_none() -> None:
    one, other = divided_profile(sizes=(1,)), divided_profile(sizes=(4,))
    assert merge_profiles([one, other]).table("x").part_forward == ((0.0, FORWARD, 0.0), (0.0, 4 * FORWARD, 0.0))
    bare = replace(other, accelerators={"x": replace(other.table("x"), part_backward=None)})
    merged = merge_profiles([one, bare]).table("x")
    assert merged.part_backward == ((0.0, BACKWARD, 0.0), (0.0, 4 * BACKWARD, 0.0))
    assert merged.delayed is None
    weighed = replace(other, accelerators={"x": replace(other.table("x"), delayed=((1.0, 2.0, 3.0),))})
    merged = merge_profiles([one, weighed]).table("x")
    assert merged.delayed == (one.table("x").saved_activations[0], (1.0, 2.0, 3.0))


def test_a_layer_in_slices_needs_its_workspace_whole() -> None:
    """A layer that the search may divide, but a stage has whole, needs for a moment what it needs undivided."""
    profile = divided_profile()
    table = replace(profile.table("x"), layer_workspace=((1.0, 100.0, 2.0),))
    profile = replace(profile, accelerators={"x": table})
    whole, finer = make_chain(profile, ["x"], 1), make_chain(profile, ["x"], 1, split={1: 4})
    # What is sent, 40 bytes, counts as a message.
    assert stage_bytes(finer, 0, 4).workspace == stage_bytes(whole, 0, 1).workspace == 100.0 - 40
    # Of all saved activations (12 bytes before the last layer's 4) those after a layer are not there as it runs.
    assert stage_bytes(finer, 0, 5).workspace == stage_bytes(whole, 0, 2).workspace == 100.0 - 4
    assert stage_bytes(finer, 0, 1).workspace == 25.0
    assert stage_bytes(finer, 2, 3).workspace == 50.0
    assert stage_bytes(finer, 3, 5).workspace == 50.0 - 4


def test_a_stage_holds_what_libraries_keep_once() -> None:
    profile = divided_profile()
    bare = make_chain(profile, ["x"], 1, split={1: 4})
    table = replace(profile.table("x"), library=(0.0, 30.0, 20.0))
    chain = make_chain(replace(profile, accelerators={"x": table}), ["x"], 1, split={1: 4})
    for first, last, kept in ((0, 0, 0.0), (0, 2, 30.0), (2, 5, 30.0), (5, 5, 20.0)):
        assert stage_bytes(chain, first, last).workspace == stage_bytes(bare, first, last).workspace + kept
    assert chain.workspace == bare.workspace + 30.0


def test_output_channels_are_divided_as_they_were_timed() -> None:
    """Three quarters of a convolution may take longer than all of it; time steps cost what they say."""

    def edges(profile: Profile) -> list[int]:
        return [unit.stop for unit in refined(make_chain(profile, ["x"], 1)).units if unit.layer == 1]

    assert edges(divided_profile()) == [1, 2, 3, 4]
    timed = divided_profile(by="output channels")
    assert edges(timed) == [2, 4]
    bare = replace(timed.table("x"), part_forward=None, part_backward=None, part_saved_activations=None)
    assert edges(replace(timed, accelerators={"x": bare})) == [1, 2, 3, 4]


def test_what_passes_a_divided_layer_by_is_no_output_of_its_parts() -> None:
    """Of 40 bytes after the middle layer 6 came with its 10, and go on past it; a quarter of the layer makes a
    quarter of the rest."""
    profile = divided_profile()
    table = replace(profile.table("x"), passing_forward=((0.0, 6.0, 0.0),), passing_backward=((0.0, 6.0, 0.0),))
    told = make_chain(replace(profile, accelerators={"x": table}), ["x"], 1, split={1: 4})
    untold = make_chain(profile, ["x"], 1, split={1: 4})
    for sizes, bare in (
        (told.boundary_forward, untold.boundary_forward),
        (told.boundary_backward, untold.boundary_backward),
    ):
        assert sizes.tolist() == [10.0, 10 + 34 / 4, 10 + 34 / 2, 10 + 3 * 34 / 4, 40.0, 0.0]
        assert bare.tolist() == [10.0, 20.0, 30.0, 40.0, 40.0, 0.0]
    assert told.input_bytes.tolist() == [0.0, 10.0, 10 + 34 / 4, 10 + 34 / 2, 10 + 3 * 34 / 4, 40.0]
    # A stage keeps the 10 for its part. Where it sends them on, they are kept once: all of them within the layer,
    # the 6 after it, none further on.
    for last, sent, passed in ((2, 10 + 34 / 2, 10.0), (4, 40.0, 6.0), (5, 0.0, 0.0)):
        held = float(told.saved_activations[2 : last + 1].sum()) + SAVED * (1 + (last < 4))
        assert stage_bytes(told, 2, last).saved_activations == pytest.approx(held + 10.0 + sent - passed)


def test_deferred_weight_gradients_need_their_workspace() -> None:
    """But a first stage puts off its whole backward, and a profile may not tell."""
    profile = divided_profile()
    rows = {"forward_workspace": ((0.0, 30.0, 0.0),), "backward_workspace": ((0.0, 900.0, 0.0),)}
    table = replace(profile.table("x"), **rows, library=(0.0, 3.0, 0.0))
    told, untold = (
        make_chain(replace(profile, accelerators={"x": item}), ["x"], 1, split={1: 4})
        for item in (replace(table, weight_workspace=((0.0, 100.0, 7.0),)), table)
    )
    first = stage_bytes(told, 0, 5)
    assert first.weight_workspace == first.backward_workspace
    for span, needed in {(1, 5): 100.0, (1, 2): 50.0, (2, 3): 50.0, (4, 5): 25.0, (5, 5): 7.0}.items():
        assert stage_bytes(told, *span).weight_workspace == needed + (3.0 if span[0] < 5 else 0.0)
        assert stage_bytes(told, *span).backward_workspace == stage_bytes(untold, *span).backward_workspace
    assert stage_bytes(untold, 1, 2).weight_workspace == 450.0 + 3.0


def test_the_input_of_a_divided_layer_counts_once() -> None:
    """The middle layer keeps 2 of its input's 10 bytes, in its 8; each quarter would have half a byte again."""
    profile = divided_profile()
    table = replace(profile.table("x"), kept_input=((0.0, 2.0, 0.0),))
    told = make_chain(replace(profile, accelerators={"x": table}), ["x"], 1, split={1: 4})
    untold = make_chain(profile, ["x"], 1, split={1: 4})
    whole = ((0, 0), (0, 4), (0, 5), (1, 4), (1, 5), (5, 5))
    begun = {(2, 2): 0.5, (2, 3): 1.0, (2, 4): 1.5, (2, 5): 1.5, (4, 5): 0.5}
    ended = {(0, 1): 0.5, (0, 2): 1.0, (1, 3): 1.5}
    for span, twice in {**dict.fromkeys(whole, 0.0), **begun, **ended}.items():
        for parted in (True, False):
            let_go = 8.0 if span in ((2, 4), (2, 5), (4, 5)) and not parted else 0.0
            kept = (
                stage_bytes(untold, *span, parted=parted).saved_activations
                - stage_bytes(told, *span, parted=parted).saved_activations
            )
            assert kept == pytest.approx(twice + let_go), (span, parted)
        assert stage_bytes(told, *span).delayed == stage_bytes(untold, *span).delayed, "nothing sent is in it"


@pytest.mark.parametrize(
    ("schedule", "microbatches", "forward", "backward", "less"),
    [
        pytest.param("gpipe", 4, 900.0, 30.0, "no gradients", id="forwards"),
        pytest.param("gpipe", 4, 30.0, 900.0, "a micro-batch", id="second backward"),
        pytest.param("gpipe", 1, 30.0, 900.0, "no gradients", id="only backward"),
        pytest.param("1f1b-sno", 4, 30.0, 900.0, "no message", id="1f1b"),
    ],
)
def test_orders_that_run_all_forwards_first_need_less_memory(
    schedule: str, microbatches: int, forward: float, backward: float, less: str
) -> None:
    """GPipe makes gradients with its first backward, and at the second a micro-batch is gone.

    1F1B has had a backward by the time that memory is full. No message waits in either: links are fast. Where a
    profile does not tell the phases, nothing of it is known.
    """
    profile = divided_profile()
    table = replace(profile.table("x"), saved_activations=((1.0, 2.0, 4.0),), layer_workspace=((0.0, 900.0, 0.0),))
    told = replace(table, forward_workspace=((0.0, forward, 0.0),), backward_workspace=((0.0, backward, 0.0),))
    stages = (StageChoice(first=0, last=1, accelerators=(0,)), StageChoice(first=2, last=2, accelerators=(1,)))

    def memory(table: CostTable) -> float:
        chain = make_chain(replace(profile, accelerators={"x": table}), ["x"], 1)
        order = SCHEDULES[schedule](2, microbatches)
        candidate = Candidate(label="made", chain=chain, stages=stages, schedule=order)
        return evaluate(candidate, Hardware(cluster=cluster(2))).memory[0]

    gradients, held, ahead = 8.0 + 40.0, 1.0 + 2.0 + 40.0, 2 * 40.0
    expected = {"no message": 0.0, "a micro-batch": held, "no gradients": gradients}[less]
    assert memory(table) - memory(told) == expected + ahead
