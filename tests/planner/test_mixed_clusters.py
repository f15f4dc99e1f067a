"""Mixed clusters too large to be searched as a whole: pipelines of one type each, and copies of mixed parts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from bapipe.costs.profile import Profile
from bapipe.costs.segments import make_chain
from bapipe.hardware.cluster import Accelerator, Cluster, Link
from bapipe.planner import Exploration, Request, explore, make_plan
from bapipe.planner.candidate import Candidate, Hardware, as_run
from bapipe.planner.evaluate import evaluate
from bapipe.planner.pipelines import FAMILIES, unreplicated_stages
from bapipe.planner.plan_timeline import plan_timeline
from bapipe.planner.tuning import Tuning
from bapipe.planner.typed_pipelines import deal, pipelines_of_types, stage_pace, typed_candidate
from bapipe.records.plan import read_plan, write_plan
from bapipe.records.plan_consistency import require_consistent
from bapipe.schedule.replicas import replicated_pipelines
from bapipe.schedule.schedule_file import ScheduleFile
from bapipe.schedule.validate import require_valid
from made_profiles import made_cluster, made_profile

LAYERS = 12
WORK = [1.0 + 0.1 * (index % 3) for index in range(LAYERS)]
LARGE = Tuning(thorough_size=4 * LAYERS, whole_actions=4_000)
"""clusters of five accelerators or more are large ones"""
SLOWER = {"fast": 1.0, "slow": 3.0, "slowest": 5.0}


def machines(kinds: list[str], *, each: int = 4, memory: dict[str, float] | None = None) -> Cluster:
    """Machines of one type each."""
    names = list(dict.fromkeys(kinds))
    flat = made_cluster(dict.fromkeys(names, 1), bandwidth=100.0)
    types = {name: replace(flat.types[name], memory=(memory or {}).get(name, 60.0)) for name in names}
    placed = tuple(
        Accelerator(name=f"m{number}/{index}", type=kind, node=f"m{number}")
        for number, kind in enumerate(kinds)
        for index in range(each)
    )
    return replace(flat, accelerators=placed, types=types, between=Link(bandwidth=20.0, latency=1e-3))


def profile_of(*names: str, sizes: tuple[int, ...] = (1, 2)) -> Profile:
    work = {name: [own * SLOWER[name] for own in WORK] for name in names}
    return made_profile(
        work, boundary=[0.3] * LAYERS, weights=[6.0] * LAYERS, saved_activations=[1.0] * LAYERS, sizes=sizes
    )


def planned(kinds: list[str], batch: int, *, tuning: Tuning = LARGE, **more: object) -> Exploration:
    cluster = machines(kinds, **more)  # type: ignore[arg-type]
    profile = profile_of(*dict.fromkeys(kinds))
    return explore(profile, cluster, Request(global_batch=batch), tuning=tuning)


def ideal(kinds: list[str], *, each: int = 4) -> float:
    """Samples/s of all accelerators if nothing was ever waited for."""
    return sum(each / (sum(WORK) * SLOWER[kind]) for kind in kinds)


def dealt_by_hand(cluster: Cluster, microbatches: int, *, near: bool = False) -> tuple[Candidate, Hardware]:
    """Pipelines of four: as many of each type as there are machines, in as many copies as may be."""
    hardware, types = Hardware(cluster=cluster), list(dict.fromkeys(item.type for item in cluster.accelerators))
    chain = make_chain(profile_of(*types), tuple(types), 1)
    stages = unreplicated_stages([2, 5, 8, LAYERS - 1], range(4))
    numbers = {name: sum(item.type == name for item in cluster.accelerators) // 4 for name in types}
    pipelines = next(
        own for own in pipelines_of_types(cluster, 4, numbers, microbatches) if len(own) == len(cluster)
    )
    own = microbatches // pipelines.copies
    dealing = deal(*stage_pace(chain, stages, cluster, types), pipelines, own)
    assert dealing is not None
    candidate = typed_candidate(
        chain,
        stages,
        FAMILIES["1f1b"],
        dealing,
        pipelines=pipelines,
        microbatches=own,
        hardware=hardware,
        near=near,
    )
    return candidate, hardware


@pytest.mark.parametrize("near", [False, True])
def test_copies_of_dealt_pipelines_take_as_long_as_all_of_them(near: bool) -> None:
    candidate, hardware = dealt_by_hand(machines(["fast", "slow"] * 3), 48, near=near)
    assert candidate.copies == 3
    one = evaluate(candidate, hardware)
    whole = replace(candidate, schedule=replicated_pipelines([candidate.schedule] * 3), copies=1)
    other = evaluate(whole, hardware)
    assert one.time == pytest.approx(other.time, rel=1e-9)
    assert one.memory == pytest.approx(other.memory, rel=1e-9)
    assert one.inflight == other.inflight
    require_valid(as_run(whole))


def test_a_schedule_file_of_copies_deals_to_all_of_them() -> None:
    candidate, _ = dealt_by_hand(machines(["fast", "slow"] * 3), 48)
    schedule = as_run(candidate)
    file = ScheduleFile.of(schedule, copies=3)
    assert file.dealing == candidate.schedule.dealing
    assert file.to_schedule() == replicated_pipelines([schedule] * 3)
    require_valid(file.to_schedule())


def test_faster_pipelines_take_more_micro_batches() -> None:
    candidate, _ = dealt_by_hand(machines(["fast", "slow", "slowest"]), 46)
    fast, slow, slowest = candidate.schedule.microbatch_counts(0)
    assert fast + slow + slowest == 46
    assert fast >= 2.5 * slow > slow > slowest > 0


def test_a_mixed_cluster_is_nearly_as_fast_as_its_types_together() -> None:
    """One pipeline over all of them would leave most idle: there are fewer layers than accelerators."""
    kinds = ["fast", "slow"] * 4
    found = planned(kinds, 512)
    assert found.best.short is None
    assert found.best.throughput >= 0.85 * ideal(kinds)


@pytest.mark.parametrize("per_machine", [False, True], ids=["fixed batch", "batch by size"])
def test_samples_per_second_do_not_fall_as_a_cluster_grows(per_machine: bool) -> None:
    rates = []
    for times in (1, 2, 4, 8):
        kinds = ["fast", "slow", "fast"] * times
        rates.append(planned(kinds, 240 * times if per_machine else 960).best.throughput)
    assert all(after >= before for before, after in itertools.pairwise(rates))
    if per_machine:
        assert rates[-1] >= 0.97 * 8 * rates[0]


def test_a_mixed_cluster_whose_plans_are_all_tried_is_divided_too() -> None:
    """Few layers on many accelerators: small enough for every partition, none of which runs in copies."""
    kinds = ["fast", "slow"] * 3
    found = planned(kinds, 192, tuning=Tuning(search_steps=0, layer_steps=0))
    assert found.best.throughput >= 0.9 * ideal(kinds)


def test_types_may_differ_in_number_and_memory() -> None:
    """Cuts fit the type with least memory; what is left over is at most a fifth."""
    kinds = ["fast", "slow", "slowest", "fast", "slow", "fast"]
    found = planned(kinds, 480, memory={"fast": 60.0, "slow": 40.0, "slowest": 50.0})
    assert found.best.short is None
    assert found.best.throughput >= 0.8 * ideal(kinds)


def test_the_plan_of_dealt_pipelines_is_read_back_and_takes_what_it_says(tmp_path: Path) -> None:
    found = planned(["fast", "slow"] * 4, 512)
    best = found.best
    assert best.candidate.schedule.dealing is not None
    write_plan(make_plan(found), tmp_path / "plan.json")
    plan = read_plan(tmp_path / "plan.json")
    require_consistent(plan)
    for stage in plan.stages:
        assert stage.replicas is not None
        assert len(stage.replicas) == len(stage.accelerators)
        assert sum(own.microbatches for own in stage.replicas) == plan.microbatches
        assert all(own.memory_bytes <= own.memory_capacity for own in stage.replicas)
    assert plan_timeline(plan).time == pytest.approx(plan.prediction.time, rel=1e-9)


def test_idle_accelerators_of_a_mixed_cluster_are_explained() -> None:
    """A type that is a hundred times slower is left out."""
    slow = dict(SLOWER)
    try:
        SLOWER["slow"] = 300.0
        found = planned(["fast", "slow"] * 2, 32)
    finally:
        SLOWER.update(slow)
    used = {index for stage in found.best.candidate.stages for index in stage.accelerators}
    notes = [note for note in make_plan(found).notes if "idle" in note]
    assert len(used) <= 8
    assert len(notes) == 1
    assert notes[0].startswith(f"{16 - len(used)} of 16 accelerators are idle: ")


def test_a_cluster_of_slow_links_does_not_use_all_of_it() -> None:
    """Where gradients take longest to sum, what a part of the cluster reaches is a candidate for all of it."""
    profile = profile_of("fast", sizes=(1,))
    rates = []
    for count in (2, 4, 16):
        cluster = machines(["fast"] * count, memory={"fast": 1e3})
        cluster = replace(cluster, between=Link(bandwidth=0.02, latency=5.0))
        rates.append(explore(profile, cluster, Request(global_batch=64), tuning=LARGE).best.throughput)
    assert rates[0] <= rates[1] <= rates[2]
