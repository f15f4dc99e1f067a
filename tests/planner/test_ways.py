"""Stages as captured or compiled: of a profile that has both, the faster plan is taken, and why is said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bapipe.costs.profile import Profile, read_profile, write_profile
from bapipe.costs.profile_ways import join_ways, of_way
from bapipe.errors import BaPipeError, InfeasibleError
from bapipe.planner import Exploration, Request, explore, make_plan, race_candidates
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.planner.ways import other_may_be_faster
from bapipe.records.plan import read_plan, write_plan
from bapipe.records.run_record import write_run
from command import bapipe
from made_profiles import made_cluster, made_profile
from made_runs import made_run

LAYERS = 4
CLUSTER = made_cluster({"x": LAYERS}, bandwidth=1.0)
REQUEST = Request(global_batch=8, microbatch=1, stages=LAYERS)


def layers(
    seconds: float, *, parting: float = 0.0, compiled: bool, saved: float = 1.0, types: Sequence[str] = "x"
) -> Profile:
    """Equal layers, whose backward takes `parting` seconds longer in two parts."""
    made = made_profile(
        {name: [seconds] * LAYERS for name in types},
        weights=[1.0] * LAYERS,
        boundary=[0.01] * LAYERS,
        saved_activations=[saved] * LAYERS,
        sizes=(1,),
    )
    tables = {
        name: replace(
            table,
            parting=((parting,) * LAYERS,),
            weight_gradient=tuple(tuple(value / 2 for value in row) for row in table.backward),
        )
        for name, table in made.accelerators.items()
    }
    return replace(made, accelerators=tables, compiled=compiled)


def both(seconds: float, parting: float = 0.0, **captured: float) -> Profile:
    """Layers of 3 s as captured, and of so many compiled."""
    return join_ways(
        layers(3.0, compiled=False, **captured),  # type: ignore[arg-type]
        layers(seconds, parting=parting, compiled=True),
    )


def alone(seconds: float, parting: float = 0.0, **request: object) -> Exploration:
    own = layers(seconds, parting=parting, compiled=True)
    return explore(own, CLUSTER, replace(REQUEST, **request))  # type: ignore[arg-type]


def note_of(found: Exploration) -> str:
    notes = [note for note in make_plan(found).notes if note.startswith("stages run")]
    assert len(notes) == 1
    return notes[0]


def test_compiled_stages_are_taken_where_they_are_faster() -> None:
    found = explore(both(2.0), CLUSTER, REQUEST)
    plan = make_plan(found)
    assert plan.compiled
    assert plan.prediction.time == alone(2.0).best.time
    captured = explore(layers(3.0, compiled=False), CLUSTER, REQUEST).best
    assert found.other_way is not None
    assert found.other_way.best.time == captured.time > plan.prediction.time
    longer = captured.time / plan.prediction.time - 1
    assert note_of(found).startswith(
        "stages run compiled: as captured, the best plan is zb, 4 stages, micro-batch 1"
    )
    assert f"{longer:.1%} longer" in note_of(found)
    assert "every run compiles once" in note_of(found)
    other = plan.alternatives[0]
    assert other.name == "as captured: zb, 4 stages, micro-batch 1"
    assert (other.time, other.memory_bytes) == (captured.time, max(captured.memory))


def test_stages_as_captured_are_taken_where_they_are_faster() -> None:
    found = explore(both(3.5), CLUSTER, REQUEST)
    assert not make_plan(found).compiled
    assert note_of(found).startswith("stages run as captured: compiled, the best plan is zb")
    assert "longer" in note_of(found)
    assert "every run compiles" not in note_of(found)
    assert make_plan(found).alternatives[0].name.startswith("compiled: ")


def test_where_both_are_as_fast_nothing_is_compiled() -> None:
    found = explore(both(3.0), CLUSTER, REQUEST)
    assert not make_plan(found).compiled
    assert "as long" in note_of(found)


def test_a_split_backward_that_loses_more_than_its_bubble_gives_compiled_1f1b() -> None:
    """Without that loss, and as captured, a zero-bubble order is the best of these layers."""
    found = explore(both(2.0, parting=0.6), CLUSTER, REQUEST)
    assert make_plan(found).compiled
    assert make_plan(found).schedule.name == "1f1b"
    assert not found.best.schedule.parted_stages()
    assert found.other_way is not None
    assert found.other_way.best.schedule.parted_stages()
    assert explore(both(2.0), CLUSTER, REQUEST).best.schedule.parted_stages()
    forced = explore(both(2.0, parting=0.6), CLUSTER, replace(REQUEST, schedule="zb"))
    assert forced.best.time > found.best.time


def test_a_loss_that_leaves_zero_bubble_the_fastest_is_taken_as_captured() -> None:
    """Compiled layers are faster alone, but compiled 1F1B is slower than a zero-bubble order as captured."""
    found = explore(both(2.8, parting=0.9), CLUSTER, REQUEST)
    assert not make_plan(found).compiled
    assert found.best.schedule.parted_stages()
    assert found.other_way is not None
    assert not found.other_way.best.schedule.parted_stages()


@pytest.mark.parametrize("compiled", [True, False])
def test_what_is_asked_for_is_planned_alone(compiled: bool) -> None:
    for seconds in (2.0, 3.5):
        found = explore(both(seconds), CLUSTER, replace(REQUEST, compiled=compiled))
        plan = make_plan(found)
        assert plan.compiled == compiled
        assert found.other_way is None
        assert not [note for note in plan.notes if "stages run" in note]
        expected = layers(seconds if compiled else 3.0, compiled=compiled)
        assert plan.prediction.time == explore(expected, CLUSTER, REQUEST).best.time
        assert plan.profile_hash == expected.hash


@pytest.mark.parametrize("compiled", [True, False])
def test_one_way_that_was_measured_is_marked_where_the_other_is_asked_for(compiled: bool) -> None:
    found = explore(layers(3.0, compiled=not compiled), CLUSTER, replace(REQUEST, compiled=compiled))
    plan = make_plan(found)
    assert plan.compiled == compiled
    assert f"profile {'with' if compiled else 'without'} --compile for their own" in note_of(found)


def test_another_word_is_refused() -> None:
    with pytest.raises(BaPipeError, match="--compile is auto, yes or no, got 'perhaps'; give one of them"):
        Request(compiled="perhaps")  # type: ignore[arg-type]


def test_a_way_that_does_not_fit_leaves_the_other() -> None:
    profile, small = both(3.5, saved=100.0), made_cluster({"x": LAYERS}, bandwidth=1.0, memory=50.0)
    strict = replace(REQUEST, recompute="never")
    found = explore(profile, small, strict)
    assert make_plan(found).compiled
    assert note_of(found) == "stages run compiled: as captured, no plan fits"
    turned = join_ways(layers(3.0, compiled=False), layers(2.0, compiled=True, saved=100.0))
    found = explore(turned, small, strict)
    assert not make_plan(found).compiled
    assert note_of(found) == "stages run as captured: compiled, no plan fits"
    with pytest.raises(InfeasibleError):
        explore(both(2.0), made_cluster({"x": LAYERS}, memory=1.0), strict)


def test_a_size_that_one_way_was_not_measured_at_is_planned_the_other_way() -> None:
    """As captured, the larger size ran out of memory when it was measured."""
    captured, compiled = layers(3.0, compiled=False), layers(3.5, compiled=True)
    more = {name: replace(table, microbatches=(2,)) for name, table in compiled.accelerators.items()}
    profile = join_ways(captured, replace(compiled, accelerators=more))
    found = explore(profile, CLUSTER, replace(REQUEST, microbatch=2))
    assert make_plan(found).compiled
    assert note_of(found).startswith(
        "stages run compiled: as captured, the profile of made on x covers micro-batches"
    )
    with pytest.raises(BaPipeError, match="covers micro-batches of 1 to 1, asked for 4"):
        explore(profile, CLUSTER, replace(REQUEST, microbatch=4))
    with pytest.raises(BaPipeError, match="9 stages need as many accelerators"):
        explore(profile, CLUSTER, replace(REQUEST, stages=9))


def test_a_type_without_compiled_costs_runs_as_captured() -> None:
    captured = layers(3.0, compiled=False, types="xy")
    profile = join_ways(captured, layers(2.0, compiled=True))
    mixed = made_cluster({"x": 2, "y": 2}, bandwidth=1.0)
    found = explore(profile, mixed, REQUEST)
    assert not make_plan(found).compiled
    assert note_of(found) == "stages run as captured: layers were not measured compiled on y"
    assert make_plan(explore(profile, CLUSTER, REQUEST)).compiled


def test_torchs_engines_run_layers_as_captured() -> None:
    cluster, asked = made_cluster({"x": 2}, bandwidth=1e9), Request(global_batch=8, microbatch=1, strategy="ddp")
    found = explore(both(2.0), cluster, asked)
    plan = make_plan(found)
    assert (plan.engine, plan.compiled) == ("ddp", False)
    assert note_of(found) == "stages run as captured: ddp runs layers as they are"
    # Nobody asked for them here: a compiled plan is none of theirs, which no run would take.
    free = explore(layers(2.0, compiled=True), cluster, Request(global_batch=8, microbatch=1))
    assert {own.candidate.engine for own in free.considered} == {"bapipe"}


def test_both_are_raced_where_the_error_does_not_tell_them_apart() -> None:
    asked = replace(REQUEST, link_error=0.0)
    for seconds, error, raced in ((2.9, 0.1, True), (1.5, 0.02, False), (3.1, 0.1, True), (6.0, 0.02, False)):
        found = explore(both(seconds), CLUSTER, replace(asked, layer_error=error))
        assert other_may_be_faster(found) == raced
        plans = race_candidates(found, limit=3)
        assert len(plans) <= 3
        assert plans[0].compiled == (seconds < 3)
        assert any(plan.compiled != plans[0].compiled for plan in plans) == raced
        assert len(race_candidates(found, limit=1)) == 1
        other = make_plan(found).alternatives[0].reason
        assert other.startswith("within error of the best") == raced


def test_a_raced_plan_of_the_other_way_says_so_and_is_of_its_own_costs() -> None:
    found = explore(both(2.9), CLUSTER, replace(REQUEST, layer_error=0.1, link_error=0.0))
    captured = race_candidates(found, limit=2)[-1]
    assert not captured.compiled
    assert captured.profile_hash == of_way(both(2.9), compiled=False).hash
    assert any(note.startswith("stages run as captured: compiled, the best plan") for note in captured.notes)
    assert any("less" in note for note in captured.notes if note.startswith("stages run"))


def test_without_errors_the_other_way_is_one_of_the_alternatives_that_are_raced() -> None:
    found = explore(both(2.0), CLUSTER, REQUEST)
    plans = race_candidates(found, limit=3)
    assert [plan.compiled for plan in plans] == [True, True, False]


def test_the_plan_and_explain_say_what_the_other_way_costs(tmp_path: Path) -> None:
    own = [
        layers(seconds, parting=parting, compiled=compiled, types=("v100-16",))
        for seconds, parting, compiled in ((3.0, 0.0, False), (2.0, 0.6, True))
    ]
    write_profile(join_ways(*own), tmp_path / "profile.json")
    words = ("profile.json", "--cluster", "4xv100", "--global-batch", "8", "--stages", "4")
    done = bapipe("plan", *words, "--explain", "--out", "plan.json", folder=tmp_path, COLUMNS="160")
    assert done.returncode == 0, done.stderr
    assert read_plan(tmp_path / "plan.json").compiled
    table = done.stdout.partition("stages as captured or compiled")[2].partition("└")[0]
    rows = {
        cells[1]: cells
        for cells in ([cell.strip() for cell in line.split("│")] for line in table.splitlines()[4:])
        if len(cells) > 1
    }
    assert list(rows) == ["compiled (chosen)", "as captured"]
    time, whole, split = rows["compiled (chosen)"][3:6]
    assert time == whole
    assert float(whole.split()[0]) < float(split.split()[0])
    time, whole, split = rows["as captured"][3:6]
    assert time == split
    assert float(split.split()[0]) < float(whole.split()[0])
    done = bapipe("plan", *words, "--compile", "no", "--explain", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "stages as captured or compiled" not in done.stdout


@pytest.mark.parametrize("compiled", [True, False])
def test_a_report_and_a_comparison_take_the_costs_of_the_plans_way(compiled: bool, tmp_path: Path) -> None:
    profile = both(2.0 if compiled else 3.5)
    plan = make_plan(explore(profile, CLUSTER, REQUEST))
    assert plan.compiled == compiled
    write_profile(profile, tmp_path / "profile.json")
    write_plan(plan, tmp_path / "plan.json")
    write_run(made_run(plan, plan_timeline(plan)), tmp_path / "run.json")
    done = bapipe("report", "plan.json", "--profile", "profile.json", "-o", "report.html", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    words = ("plan.json", "run.json", "--profile", "profile.json", "--recalibrate", "corrected.json")
    done = bapipe("compare", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    corrected, own = read_profile(tmp_path / "corrected.json"), of_way(profile, compiled=compiled)
    assert corrected.compiled == compiled
    assert corrected.at("x", 1).forward == pytest.approx(own.at("x", 1).forward)
